"""Whether a session should go back to the hops that hold the beginning of its text.

Going back saves reading that beginning again, once; a quicker chain saves something on every token. Owns this choice.
Knows neither how the hops find what they hold (`swarm.block_hash`) nor who remembers where a text has been.
"""

from __future__ import annotations

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.pipeline.prefill_chunking import plan_prefill

TYPICAL_ANSWER_TOKENS = 256  # tokens; limits are often far above what is written


def prefer_cached_prefix(held: int, tokens: int, usual_ms: float, best_ms: float, best: ChainCosts) -> bool:
    """Whether the chain that holds `held` tokens finishes `tokens` more no later than the quickest chain, `best`.

    `usual_ms`, `best_ms`: what a token costs along either. Along `best` the held tokens are read first, in chunks.
    """
    if held < 1:
        return False
    read_ms = plan_prefill(held, len(best.stages), min(held, 32), best.chunk_cost()).latency_ms
    return min(tokens, TYPICAL_ANSWER_TOKENS) * (usual_ms - best_ms) <= read_ms
