"""How a prompt is cut for the chain in use. Owns the bounds on a chunk; the cut itself is `plan.prefill`'s."""

from __future__ import annotations

import itertools
import math

import msgspec

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.pipeline.prefill_chunking import plan_prefill

MIN_CHUNK = 8  # tokens; what the kernels want to be worth their start
STEP_MS = 1.0  # what a step costs a node besides computing, which no curve shows: frames, queues, packing
MAX_CHUNK = 512  # what a node packs into one batch by default


def prompt_chunks(length: int, costs: ChainCosts) -> tuple[int, ...]:
    """Chunk lengths for the next `length` tokens, which all hops of the chain lack.

    The planner's cut takes the cost of a chunk for a straight line. Curves have bends, so equal chunks of each width
    that a curve has a point for are tried as well, and the hops' own curves decide.
    """
    if length < 1:
        return ()
    line = costs.chunk_cost()
    if line.ms(MIN_CHUNK, 0) <= 0.0:
        return _split(length, MAX_CHUNK)
    line = msgspec.structs.replace(line, base_ms=line.base_ms + STEP_MS)
    planned = plan_prefill(length, len(costs.stages), MIN_CHUNK, line).chunks
    cuts = [tuple(part for chunk in planned for part in _split(chunk, MAX_CHUNK))]
    widths = {width for stage in costs.stages for width in stage.cost.widths if MIN_CHUNK <= width <= MAX_CHUNK}
    cuts += [_split(length, width) for width in sorted(widths)]
    return min(cuts, key=lambda cut: costs.prefill_ms(cut, STEP_MS))


def _split(chunk: int, most: int) -> tuple[int, ...]:
    """In equal parts of at most `most` tokens."""
    count = math.ceil(chunk / most)
    edges = [chunk * i // count for i in range(count + 1)]
    return tuple(b - a for a, b in itertools.pairwise(edges))
