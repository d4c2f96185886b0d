"""Chunked prefill: the chunks of a prompt that a pipeline of equal stages finishes soonest (Jupiter, §IV-B2).

Owns the sizes of the chunks. Knows neither what a stage is made of nor how its cost was measured; links that take about
as long for every chunk do not change the result.

Jupiter finds, for each number of chunks k, the cut S(n, k) whose slowest chunk is fastest, and then picks k by the
latency, sum of t_i + (d-1) * max t_i. That is best only if the sum does not depend on the cut. It does, unless a token
is charged for just the half of its own chunk that causal attention sees. So the latency itself is minimised here, and
quickly enough to do it for each prompt:

1. Of two neighbours the longer chunk may go first: that changes no length and raises no time. So lengths only fall.
2. Under a bound on max t_i, taking each chunk as long as the bound allows reaches furthest after any number of chunks.
   Such a cut needs the fewest chunks and, as its partial sums dominate those of any other (majorization), it has the
   largest sum of len_i^2, hence the least sum of t_i.
3. So only the bound is left to search: branch and bound, since the least sum can only fall as the bound rises.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from swarm.errors import UsageError
from swarm.quantities import Amount, Schema

MAX_CHUNKS = 1 << 16
_TOLERANCE = 1e-12  # relative; a cut better by less than this is not searched for


class ChunkCost(Schema, frozen=True):
    """One stage's time for a chunk of tokens after a prefix, ms:

        t(len | prefix) = base_ms + len * (per_token_ms + per_token_context_ms * (prefix + within_chunk * len))

    `within_chunk`: how much of its own chunk a token is charged for, from 0 (folded into `per_token_ms`) to 0.5 (what
    causal attention really sees).
    """

    base_ms: Amount
    per_token_ms: Amount
    per_token_context_ms: Amount
    within_chunk: Annotated[float, Meta(ge=0, le=0.5)] = 0.0

    def __post_init__(self) -> None:
        for ms in (self.base_ms, self.per_token_ms, self.per_token_context_ms):
            if ms != 0 and not 1e-30 <= ms <= 1e30:
                raise UsageError(f"{ms} ms cannot be a cost; each is 0 or between 1e-30 and 1e30")
        if not 0 <= self.within_chunk <= 0.5:
            raise UsageError(f"within_chunk is {self.within_chunk}; it lies between 0 and 0.5")

    def ms(self, length: int, prefix: int) -> float:
        """t(length | prefix); rises with both."""
        context = prefix + self.within_chunk * length
        return self.base_ms + length * (self.per_token_ms + self.per_token_context_ms * context)

    def longest(self, prefix: int, bound: float, limit: int) -> int:
        """The most tokens after `prefix` that take at most `bound` ms; `limit` at most."""
        slack = bound - self.base_ms
        linear = self.per_token_ms + self.per_token_context_ms * prefix
        square = self.per_token_context_ms * self.within_chunk
        steepness = linear + math.sqrt(linear * linear + 4 * square * slack) if slack > 0 else math.inf
        if steepness * limit <= 2 * slack:
            return limit
        count = math.floor(2 * slack / steepness)  # the root of a quadratic; rounding may be off by one either way
        if self.ms(count + 1, prefix) <= bound:
            return count + 1
        return count if self.ms(count, prefix) <= bound else count - 1


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Chunk lengths in order, each one's ms on one stage, and the ms until the last stage has finished the last."""

    chunks: tuple[int, ...]
    chunk_ms: tuple[float, ...]
    latency_ms: float


def plan_prefill(length: int, stages: int, min_chunk: int, cost: ChunkCost) -> PrefillPlan:
    """The cut of `length` tokens with the least pipelined latency over `stages` equal stages.

    Every chunk has at least `min_chunk` tokens, so a prompt shorter than two of them stays whole. Exact to one part in
    10^12. Raises UsageError.
    """
    if min(length, stages, min_chunk) < 1:
        raise UsageError("length, stages and min_chunk must all be at least 1")
    if length // min_chunk > MAX_CHUNKS:
        raise UsageError(f"{length} tokens in chunks of {min_chunk} may be over {MAX_CHUNKS} chunks; raise min_chunk")
    best = _priced((length,), stages, cost)
    if length < 2 * min_chunk:
        return best
    low, high = cost.ms(min_chunk, length - min_chunk), best.chunk_ms[0]
    if low >= high:
        return best  # even the last chunk of any cut takes as long as the whole
    shortest = _fill(length, min_chunk, cost, low)
    if shortest is not None:
        best = min(best, _priced(shortest, stages, cost), key=_latency)
    # Open ranges (low, high] of the bound: least latency any cut in it could have, low, high, least sum at high.
    ranges = [((stages - 1) * low + high, low, high, high)]
    while ranges:
        promise, low, high, least_sum = heapq.heappop(ranges)
        middle = (low + high) / 2
        if promise >= best.latency_ms * (1 - _TOLERANCE) or not low < middle < high:
            continue
        heapq.heappush(ranges, (least_sum + (stages - 1) * middle, middle, high, least_sum))
        chunks = _fill(length, min_chunk, cost, middle)
        if chunks is None:
            continue
        found = _priced(chunks, stages, cost)
        best = min(best, found, key=_latency)
        total = math.fsum(found.chunk_ms)
        heapq.heappush(ranges, (total + (stages - 1) * low, low, min(middle, max(found.chunk_ms)), total))
    return best


def _fill(length: int, min_chunk: int, cost: ChunkCost, bound: float) -> tuple[int, ...] | None:
    """The cut that takes each chunk as long as `bound` ms allows, ending with the shortest; None if there is none.

    `reach[j]` is the furthest that j chunks get; the j-th edge stops short of it where the rest needs the room.
    """
    if cost.ms(length, 0) <= bound:
        return (length,)
    last_start = length - min_chunk  # a shorter last chunk is not allowed, and a longer one would take longer
    reach = [0]
    while reach[-1] < length:
        start = min(reach[-1], last_start)
        reach.append(start + max(min_chunk, cost.longest(start, bound, length - start)))
    count = len(reach) - 1
    if count * min_chunk > length:
        return None
    edges = [min(far, length - (count - j) * min_chunk) for j, far in enumerate(reach)]
    return tuple(b - a for a, b in pairwise(edges))


def _priced(chunks: tuple[int, ...], stages: int, cost: ChunkCost) -> PrefillPlan:
    """Jupiter's eq. 4: the last chunk leaves the first stage after the sum; d-1 stages wait for the slowest chunk."""
    times, prefix = [], 0
    for chunk in chunks:
        times.append(cost.ms(chunk, prefix))
        prefix += chunk
    return PrefillPlan(chunks, tuple(times), math.fsum(times) + (stages - 1) * max(times))


def _latency(plan: PrefillPlan) -> tuple[float, int]:
    return plan.latency_ms, len(plan.chunks)
