"""How a prompt is cut for the chain in use. Owns the bounds on a chunk; the cut itself is `plan.prefill`'s."""

from __future__ import annotations

import itertools
import math

from swarm.plan.prefill import plan_prefill
from swarm.plan.speculation import ChainCosts

MIN_CHUNK = 32  # tokens; below that a step's fixed costs, which no curve shows, rule
MAX_CHUNK = 512  # what a node packs into one batch by default


def prompt_chunks(length: int, costs: ChainCosts) -> tuple[int, ...]:
    """Chunk lengths for the next `length` tokens, which all hops of the chain lack."""
    if length < 1:
        return ()
    cost = costs.chunk_cost()
    if cost.ms(MIN_CHUNK, 0) <= 0.0:
        return _split(length)
    planned = plan_prefill(length, len(costs.stages), MIN_CHUNK, cost).chunks
    return tuple(part for chunk in planned for part in _split(chunk))


def _split(chunk: int) -> tuple[int, ...]:
    """In equal parts of at most MAX_CHUNK."""
    count = math.ceil(chunk / MAX_CHUNK)
    edges = [chunk * i // count for i in range(count + 1)]
    return tuple(b - a for a, b in itertools.pairwise(edges))
