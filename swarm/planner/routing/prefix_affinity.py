"""Whether a session should use the chain whose hops have a prefix of its text cached (prefix-cache-aware routing).

A cached prefix saves its prefill, once; a faster chain saves something on every token. Owns this choice. Knows neither
how hops look up a prefix (`swarm.block_hash`) nor who records where prefixes are cached.
"""

from __future__ import annotations

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.pipeline.prefill_chunking import plan_prefill
from swarm.planner.routing.policy import POLICY, RoutingPolicy

MIN_CHUNK_TOKENS = 32


def prefer_cached_prefix(
    held: int, tokens: int, usual_ms: float, best_ms: float, best: ChainCosts, policy: RoutingPolicy = POLICY
) -> bool:
    """Whether the chain with `held` cached tokens finishes `tokens` more no later than the quickest chain, `best`.

    `usual_ms`, `best_ms`: time per token on either. On `best` the cached tokens are prefilled first, in chunks.
    """
    if held < 1:
        return False
    prefill_ms = plan_prefill(held, len(best.stages), min(held, MIN_CHUNK_TOKENS), best.chunk_cost()).latency_ms
    return min(tokens, policy.typical_answer_tokens) * (usual_ms - best_ms) <= prefill_ms
