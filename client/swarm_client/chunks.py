"""How a prompt is cut for the chain in use. Owns the bounds on a chunk; the cut itself is `plan.prefill`'s."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from swarm.plan.prefill import plan_prefill
from swarm.plan.speculation import ChainCosts

MIN_CHUNK = 8  # tokens; what the kernels want to be worth their start
STEP_MS = 1.0  # what a step costs a node besides computing, which no curve shows: frames, queues, packing
MAX_CHUNK = 512  # what a node packs into one batch by default


def prompt_chunks(length: int, costs: ChainCosts) -> tuple[int, ...]:
    """Chunk lengths for the next `length` tokens, which all hops of the chain lack."""
    if length < 1:
        return ()
    cost = costs.chunk_cost()
    if cost.ms(MIN_CHUNK, 0) <= 0.0:
        return _split(length)
    cost = replace(cost, base_ms=cost.base_ms + STEP_MS)
    planned = plan_prefill(length, len(costs.stages), MIN_CHUNK, cost).chunks
    return tuple(part for chunk in planned for part in _split(chunk))


def _split(chunk: int) -> tuple[int, ...]:
    """In equal parts of at most MAX_CHUNK."""
    count = math.ceil(chunk / MAX_CHUNK)
    edges = [chunk * i // count for i in range(count + 1)]
    return tuple(b - a for a, b in itertools.pairwise(edges))
