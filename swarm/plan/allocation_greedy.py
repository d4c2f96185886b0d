"""Forming k replicas out of given capacities by hand: pairing, longest-first, and repair by pairwise re-splitting.

Everything here finds replicas or gives up; that more are impossible is for `allocation_bounds` and the exact searches
to say. Knows capacities only, each below L layers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from swarm.plan.budget import Budget

Bin = list[int]
"""The capacities of one replica's nodes."""

_EXTEND_TRIES = 6  # re-splits, twice, to make room for one more replica before starting over
_REPAIR_TRIES = 40  # re-splits before a start is given up
_SPLIT_STEPS = 5  # what one costs


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


def form(capacities: Sequence[int], replicas: int, num_layers: int, budget: Budget) -> list[Bin] | None:
    """`replicas` bins of at least L layers out of `capacities`, sorted downwards; None if not found."""
    pairs, rest = match_pairs(capacities, num_layers)
    left = replicas - len(pairs)
    if left <= 0:
        return pairs[:replicas]
    budget.spend(len(rest) // 4)
    bins = longest_first(rest, left)
    if repair(bins, [sum(members) for members in bins], num_layers, budget, _REPAIR_TRIES):
        return pairs + bins
    return None


def longest_first(capacities: Sequence[int], replicas: int) -> list[Bin]:
    """Each capacity, from the largest down, to the bin that holds the fewest layers so far (Graham's LPT)."""
    bins: list[Bin] = [[] for _ in range(replicas)]
    heap = list(range(replicas))  # layers * replicas + index of the bin
    for capacity in capacities:
        least = heap[0]
        bins[least % replicas].append(capacity)
        heapq.heapreplace(heap, least + capacity * replicas)
    return bins


def repair(bins: list[Bin], loads: list[int], num_layers: int, budget: Budget, tries: int) -> bool:
    """Re-split pairs of bins until each holds L layers; False if that fails. Updates `bins` and `loads`, their sums.

    A bin that falls short is pooled with one of the others, which keeps the fewest layers that still reach L: first
    the bins with layers to spare, the richest first, then, to stir, those without.
    """
    for short in sorted([i for i, load in enumerate(loads) if load < num_layers], key=loads.__getitem__):
        for flip in (False, True):
            full = sorted([i for i, load in enumerate(loads) if load >= num_layers], key=lambda i: -loads[i])
            for other in full[:tries]:
                kept, given = _split(sorted(bins[other] + bins[short], reverse=flip), num_layers)
                load = sum(kept)
                if load <= loads[other]:
                    loads[short] += loads[other] - load
                    loads[other] = load
                    bins[other], bins[short] = kept, given
                tries -= 1
                if loads[short] >= num_layers or not budget.spend(_SPLIT_STEPS):
                    break
            if loads[short] >= num_layers:
                break
        else:
            return False
    return True


def extend(
    bins: Sequence[Bin], loads: Sequence[int], extra: Sequence[int], num_layers: int, budget: Budget
) -> tuple[list[Bin], list[int]] | None:
    """-> `bins` and one more, of `extra` topped up with layers that the others can spare, and their loads; or None."""
    grown, sums = [*bins, list(extra)], [*loads, sum(extra)]
    return (grown, sums) if repair(grown, sums, num_layers, budget, _EXTEND_TRIES) else None


def trim(bins: Sequence[Bin], num_layers: int) -> list[Bin]:
    """The bins without members they do not need, the smallest dropped first; members sorted downwards."""
    trimmed = []
    for members in bins:
        kept = sorted(members, reverse=True)
        while sum(kept) - kept[-1] >= num_layers:
            kept.pop()
        trimmed.append(kept)
    return trimmed


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
