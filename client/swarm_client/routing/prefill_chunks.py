"""Chunked prefill: how a prompt is cut for the chain in use. Owns the bounds on a chunk.

The optimal cut for a linear cost is `planner.pipeline.prefill_chunking`'s.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import msgspec

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.pipeline.prefill_chunking import plan_prefill


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """Smaller chunks fill the pipeline sooner; larger ones pay the cost of a step less often."""

    min_chunk: int = 8  # tokens; fewer are not worth a kernel's start
    max_chunk: int = 512  # tokens; a node's default batch
    step_ms: float = 1.0  # of a step besides computing, which no cost curve has: frames, queues, packing


POLICY = PrefillPolicy()


def prompt_chunks(length: int, costs: ChainCosts, policy: PrefillPolicy = POLICY) -> tuple[int, ...]:
    """Chunk lengths for the next `length` tokens, which no hop of the chain has cached.

    The planner's cut takes the cost of a chunk for linear. Cost curves have bends, so equal chunks of each width that a
    curve has a point for are tried as well, and the hops' own curves decide.
    """
    if length < 1:
        return ()
    line = costs.chunk_cost()
    if line.ms(policy.min_chunk, 0) <= 0.0:
        return _split(length, policy.max_chunk)
    line = msgspec.structs.replace(line, base_ms=line.base_ms + policy.step_ms)
    planned = plan_prefill(length, len(costs.stages), policy.min_chunk, line).chunks
    cuts = [tuple(part for chunk in planned for part in _split(chunk, policy.max_chunk))]
    widths = {width for stage in costs.stages for width in stage.cost.widths}
    cuts += [_split(length, width) for width in sorted(widths) if policy.min_chunk <= width <= policy.max_chunk]
    return min(cuts, key=lambda cut: costs.prefill_ms(cut, policy.step_ms))


def _split(chunk: int, most: int) -> tuple[int, ...]:
    """In equal parts of at most `most` tokens."""
    count = math.ceil(chunk / most)
    edges = [chunk * i // count for i in range(count + 1)]
    return tuple(b - a for a, b in itertools.pairwise(edges))
