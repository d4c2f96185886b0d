"""The fractional relaxation of forming replicas: as many patterns as the pool allows (Gilmore and Gomory 1961).

A pattern is a replica as counts of each capacity. Patterns are generated as the simplex method asks for them, by a
min-cost covering program over layers. Either the prices prove that k replicas are impossible, or the fractional
solution shows how to form most of them: its whole parts are taken and the rest is solved again.

Prices are floats, and every step is an elementwise operation or a left-to-right sum, so that all IEEE machines take
the same path; a proof is given only after it has been checked in whole numbers. Knows capacities only, each below L.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from swarm.plan.allocation_bounds import Dual, Ints
from swarm.plan.allocation_greedy import Bin, form, longest_first, repair
from swarm.plan.budget import Budget

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)

_TINY = 1e-9
_CLEAR = 1e-6  # how far below k the float bound must be before it is worth proving in whole numbers
_PRICE = 1 << 20  # whole-number prices are in units of this fraction of a replica
_PIVOT_STEPS = 100


@dataclass(frozen=True, slots=True)
class Mixture:
    """`amounts[i]` of a replica made of the capacities `patterns[i]`, within the pool."""

    patterns: tuple[tuple[int, ...], ...]
    amounts: tuple[float, ...]


def relax(capacities: Sequence[int], replicas: int, num_layers: int, budget: Budget) -> Dual | Mixture | None:
    """A dual that proves that `capacities` cannot form `replicas`, or fractions that can; None when out of budget.

    A pool whose fractional best is short of `replicas` by less than rounding can resolve also gets its fractions.
    """
    simplex = _Simplex(capacities, num_layers)
    while simplex.value() < replicas - _TINY:
        if not budget.spend(_PIVOT_STEPS):
            return None
        entering = simplex.entering(replicas)
        if isinstance(entering, Dual):
            return entering
        if entering is None or not simplex.pivot(*entering):
            break
    return simplex.mixture()


def dive(capacities: Sequence[int], replicas: int, num_layers: int, budget: Budget) -> list[Bin] | Dual | None:
    """`replicas` bins found by rounding the relaxation again and again, a proof that there are none, or None.

    `capacities`: what `match_pairs` leaves, sorted downwards.
    """
    fixed: list[Bin] = []
    rest = Counter(capacities)
    while rest:
        answer = relax(sorted(rest.elements(), reverse=True), replicas - len(fixed), num_layers, budget)
        if not isinstance(answer, Mixture):
            return None if fixed else answer
        taken = _whole_parts(answer, rest, replicas - len(fixed))
        fixed += taken
        found = _finish(fixed, sorted(rest.elements(), reverse=True), replicas, num_layers, budget)
        if found is not None:
            return found
        if not taken:
            largest = answer.patterns[max(range(len(answer.amounts)), key=answer.amounts.__getitem__)]
            if not _take(largest, rest):
                return None
            fixed.append(list(largest))
    return None


def _whole_parts(answer: Mixture, rest: Counter[int], most: int) -> list[Bin]:
    """Bins for the whole part of each pattern's amount, taken out of `rest`."""
    taken: list[Bin] = []
    for pattern, amount in zip(answer.patterns, answer.amounts, strict=True):
        for _ in range(int(amount + _TINY)):
            if len(taken) < most and _take(pattern, rest):
                taken.append(list(pattern))
    return taken


def _take(pattern: Sequence[int], rest: Counter[int]) -> bool:
    """Take the capacities of `pattern` out of `rest`; False, and nothing taken, if they are not all there."""
    needed = Counter(pattern)
    if any(rest[c] < number for c, number in needed.items()):
        return False
    rest.subtract(needed)
    for capacity in needed:
        if not rest[capacity]:
            del rest[capacity]
    return True


def _finish(fixed: list[Bin], rest: list[int], replicas: int, num_layers: int, budget: Budget) -> list[Bin] | None:
    """`fixed` and what `rest` forms by hand; failing that, with repairs across both."""
    left = replicas - len(fixed)
    if left == 0:
        return fixed
    if len(rest) < left:
        return None
    bins = form(rest, left, num_layers, budget)
    if bins is not None:
        return fixed + bins
    bins = longest_first(rest, left) + fixed
    return bins if repair(bins, [sum(members) for members in bins], num_layers, budget, 4 * replicas + 16) else None


class _Simplex:
    """Revised simplex for: maximise sum(y), patterns @ y <= counts, y >= 0. One row a distinct capacity."""

    def __init__(self, capacities: Sequence[int], num_layers: int) -> None:
        counts = Counter(capacities)
        self._sizes = sorted(counts, reverse=True)
        self._counts = [counts[c] for c in self._sizes]
        sizes = np.array(self._sizes, dtype=np.int64)
        self._left_after: Ints = np.maximum(np.arange(num_layers + 1)[:, None] - sizes, 0)  # [L + 1, rows]
        alone = -(-num_layers // sizes)  # the first basis: patterns of one capacity each
        self._basis: list[dict[int, int] | None] = [{row: int(number)} for row, number in enumerate(alone)]
        self._inverse: Floats = np.diag(1.0 / alone)
        self._amounts: Floats = np.array(self._counts, dtype=np.float64) / alone
        self._prices: Floats = 1.0 / alone

    def value(self) -> float:
        """Replicas of the current solution; slack columns (None) count for nothing."""
        amounts: list[float] = self._amounts.tolist()
        return sum(amount for amount, column in zip(amounts, self._basis, strict=True) if column is not None)

    def mixture(self) -> Mixture:
        chosen = [
            (tuple(self._sizes[row] for row in sorted(column) for _ in range(column[row])), amount)
            for amount, column in zip(self._amounts.tolist(), self._basis, strict=True)
            if column is not None and amount > _TINY
        ]
        return Mixture(tuple(pattern for pattern, _ in chosen), tuple(amount for _, amount in chosen))

    def entering(self, replicas: int) -> tuple[dict[int, int] | None, int] | Dual | None:
        """The column to bring in, as (pattern, 0) or (None, row of a slack); a proof against `replicas`; or None."""
        row = int(self._prices.argmin())
        if self._prices[row] < -_TINY:
            return None, row
        prices = np.maximum(self._prices, 0.0)
        costs, choice = cover_costs(prices, self._left_after)
        proof = self._proof(prices, float(costs[-1]), replicas)
        if proof is not None:
            return proof
        return None if costs[-1] >= 1 - _TINY else (self._pattern(choice), 0)

    def pivot(self, pattern: dict[int, int] | None, row: int) -> bool:
        """Bring a column into the basis; False if no column can leave, which only rounding can cause."""
        column = pattern if pattern is not None else {row: 1}
        direction = np.zeros(len(self._sizes))
        gain = 0.0 if pattern is None else 1.0
        for i, number in column.items():
            direction += self._inverse[:, i] * number
            gain -= float(self._prices[i]) * number
        ratios = np.full(len(self._sizes), np.inf)
        np.divide(self._amounts, direction, out=ratios, where=direction > _TINY)
        leaving = int(ratios.argmin())
        if np.isinf(ratios[leaving]):
            return False
        amount = float(ratios[leaving])
        self._amounts = np.maximum(self._amounts - amount * direction, 0.0)
        self._amounts[leaving] = amount
        self._basis[leaving] = pattern
        pivot_row = self._inverse[leaving] / direction[leaving]
        self._prices = self._prices + gain * pivot_row
        direction[leaving] = 0.0
        self._inverse -= direction[:, None] * pivot_row
        self._inverse[leaving] = pivot_row
        return True

    def _pattern(self, choice: Ints) -> dict[int, int]:
        """The cheapest replica, read off the last capacity chosen for each number of layers."""
        pattern: dict[int, int] = {}
        layers = len(choice) - 1
        while layers > 0:
            row = int(choice[layers])
            pattern[row] = pattern.get(row, 0) + 1
            layers = int(self._left_after[layers, row])
        return pattern

    def _proof(self, prices: Floats, cheapest: float, replicas: int) -> Dual | None:
        """The prices as a dual, if in whole numbers they rule out `replicas`; `cheapest` is the price of a replica."""
        worth = sum(count * price for count, price in zip(self._counts, prices.tolist(), strict=True))
        if worth >= (replicas - _CLEAR) * cheapest:
            return None
        whole = np.floor(prices * _PRICE).astype(np.int64)
        total = int(cover_costs(whole, self._left_after)[0][-1])
        known = dict(zip(self._sizes, whole.tolist(), strict=True))
        if total <= 0 or sum(map(int.__mul__, self._counts, known.values())) // total >= replicas:
            return None
        # A capacity that is not in the pool weighs as much as the next larger one, or a whole replica.
        weights = [total] * len(self._left_after)
        for capacity in range(self._sizes[0], -1, -1):
            weights[capacity] = known.get(capacity, weights[capacity + 1] if capacity < self._sizes[0] else total)
        return Dual(tuple(weights), total)


def cover_costs(prices: npt.NDArray[Number], left_after: Ints) -> tuple[npt.NDArray[Number], Ints]:
    """-> the least price of capacities that reach h layers, and the row of one of them, for h = 0..L.

    `left_after[h, row]`: layers still to reach after taking that row. As many entries as the smallest capacity are
    found at once: none of them is among the layers left after another.
    """
    layers = len(left_after) - 1
    block = layers - int(left_after[-1, -1])
    costs = np.zeros(layers + 1, dtype=prices.dtype)
    choice = np.zeros(layers + 1, dtype=np.int64)
    for start in range(1, layers + 1, block):
        ways = prices + costs[left_after[start : start + block]]
        best = ways.argmin(axis=1)
        choice[start : start + block] = best
        costs[start : start + block] = ways.min(axis=1)
    return costs, choice
