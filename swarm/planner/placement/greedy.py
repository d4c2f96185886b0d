"""Heuristics that form k replicas out of given capacities: pairing, longest-first, repair by pairwise re-splitting.

Each finds replicas or gives up; proofs that more are impossible come from `bounds` and the exact searches. Works on
capacities only, each below L layers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from swarm.planner.placement.policy import COSTS, POLICY
from swarm.planner.placement.work_budget import WorkBudget

Bin = list[int]
"""The capacities of one replica's nodes. Shared between answers: replaced as a whole, never changed."""

_SCAN_LIMIT = 4  # up to so many of the richest bins are found faster by scanning than by sorting


def match_pairs(capacities: Sequence[int], num_layers: int) -> tuple[list[Bin], list[int]]:
    """-> (pairs that sum to exactly L, everything else sorted downwards).

    Forming these pairs never costs a replica: if a and b = L - a sit in two replicas with companions X and Y, then X
    holds at least b and Y at least a layers, so {a, b} and X + Y are two replicas as well.
    """
    counts = Counter(capacities)
    pairs: list[Bin] = []
    for large in [c for c in counts if 2 * c >= num_layers]:
        small = num_layers - large
        number = counts[large] // 2 if small == large else min(counts[large], counts.get(small, 0))
        if number:
            pairs.extend([[large, small]] * number)
            counts[large] -= number
            counts[small] -= number
    return pairs, sorted(counts.elements(), reverse=True)


def form(capacities: Sequence[int], replicas: int, num_layers: int, budget: WorkBudget) -> list[Bin] | None:
    """`replicas` bins of at least L layers out of `capacities`, sorted downwards; None if not found."""
    pairs, rest = match_pairs(capacities, num_layers)
    left = replicas - len(pairs)
    if left <= 0:
        return pairs[:replicas]
    if len(rest) < left:
        return None
    budget.spend(len(rest) // 4)
    bins = longest_first(rest, left)
    return pairs + bins if repair(bins, num_layers, budget) else None


def longest_first(capacities: Sequence[int], replicas: int) -> list[Bin]:
    """Each capacity, from the largest down, to the bin that holds the fewest layers so far (Graham's LPT).

    `capacities`: at least one for each bin.
    """
    bins = [[capacity] for capacity in capacities[:replicas]]
    heap = sorted([capacity * replicas + i for i, capacity in enumerate(capacities[:replicas])])  # layers, bin
    for capacity in capacities[replicas:]:
        least = heap[0]
        bins[least % replicas].append(capacity)
        heapq.heapreplace(heap, least + capacity * replicas)
    return bins


def repair(bins: list[Bin], num_layers: int, budget: WorkBudget) -> bool:
    """Move members between `bins` until each holds L layers; False, with bins half repaired, if that fails."""
    loads = [sum(members) for members in bins]
    short = sorted([i for i, load in enumerate(loads) if load < num_layers], key=loads.__getitem__)
    return all(_top_up(i, bins, loads, num_layers, budget, POLICY.repair_tries) for i in short)


def extend(
    bins: Sequence[Bin], loads: Sequence[int], extra: Sequence[int], num_layers: int, budget: WorkBudget
) -> tuple[list[Bin], list[int]] | None:
    """-> `bins` and one more, of `extra` topped up with layers that the others can spare, and their loads; or None."""
    grown, sums = [*bins, list(extra)], [*loads, sum(extra)]
    return (grown, sums) if _top_up(len(bins), grown, sums, num_layers, budget, POLICY.extend_tries) else None


def trim(bins: Sequence[Bin], loads: Sequence[int], num_layers: int) -> list[Bin]:
    """The bins without members they can do without, the smallest dropped first."""
    trimmed = list(bins)
    for i, load in enumerate(loads):
        if load - min(bins[i]) >= num_layers:
            kept = sorted(bins[i], reverse=True)
            while sum(kept) - kept[-1] >= num_layers:
                kept.pop()
            trimmed[i] = kept
    return trimmed


def _top_up(short: int, bins: list[Bin], loads: list[int], num_layers: int, budget: WorkBudget, tries: int) -> bool:
    """Bring bin `short` to L layers at the cost of the others, or return False; updates `bins` and `loads`, their sums.

    It is pooled with another bin, which keeps the fewest layers that still reach L: the richest bins first, then, for
    variation, those without layers to spare; `tries` of them, and again with other members preferred.
    """
    spare = sum([load - num_layers for load in sorted(loads)[-2 * tries :] if load > num_layers])
    if loads[short] + spare < num_layers:  # not even if every bin that may give layers gave all it can
        return False
    for flip in (False, True):
        if loads[short] >= num_layers or budget.spent:
            break
        for other in _richest(loads, tries):
            if loads[short] >= num_layers or loads[other] < num_layers or not budget.spend(COSTS.split):
                break
            kept, given = _split(sorted(bins[other] + bins[short], reverse=flip), num_layers)
            load = sum(kept)
            if load <= loads[other]:
                loads[short] += loads[other] - load
                loads[other] = load
                bins[other], bins[short] = kept, given
    return loads[short] >= num_layers


def _richest(loads: Sequence[int], count: int) -> Iterator[int]:
    """The bins with the most layers, richest first, as they are now; of equal ones the first."""
    if count > _SCAN_LIMIT:
        yield from sorted(range(len(loads)), key=loads.__getitem__, reverse=True)[:count]
        return
    left = list(loads)
    for _ in range(min(count, len(left))):
        richest = left.index(max(left))
        left[richest] = -1
        yield richest


def _split(pooled: Sequence[int], num_layers: int) -> tuple[Bin, Bin]:
    """-> (members with the smallest sum that reaches L, the others). Subset sums as the bits of whole numbers."""
    sums, reach = [], 1
    for capacity in pooled:
        sums.append(reach)
        reach |= reach << capacity
    above = reach >> num_layers
    target = num_layers + (above & -above).bit_length() - 1
    kept, given = [], []
    for i in range(len(pooled) - 1, -1, -1):
        if sums[i] >> target & 1:
            given.append(pooled[i])
        else:
            kept.append(pooled[i])
            target -= pooled[i]
    return kept, given
