"""The fractional relaxation of forming replicas: as many patterns as the pool allows (Gilmore and Gomory 1961).

A pattern is a replica as counts of each capacity. Patterns are generated as the simplex method asks for them, by a
min-cost covering program over layers. Either the prices prove that k replicas are impossible, or the fractional
solution shows how to form most of them: its whole parts are taken and the rest is solved again.

Prices are floats, and every step is an elementwise operation or a left-to-right sum, so that all IEEE machines take
the same path; a proof is given only after it has been checked in whole numbers. Works on capacities only, each below L.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from swarm.planner.placement.bounds import Dual, Ints
from swarm.planner.placement.greedy import Bin, form, longest_first, repair
from swarm.planner.placement.policy import COSTS, POLICY
from swarm.planner.placement.work_budget import WorkBudget

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)

_TINY = 1e-9
_CLEAR = 1e-6  # how far below k the float bound must be before it is worth proving in whole numbers
_PRICE = 1 << 40  # whole-number prices are in units of this fraction of a replica


@dataclass(frozen=True, slots=True)
class FractionalPacking:
    """`amounts[i]` of a replica made of the capacities `patterns[i]`, within the pool."""

    patterns: tuple[tuple[int, ...], ...]
    amounts: tuple[float, ...]


class Relaxation:
    """Relaxations of pools for one number of layers. Caches patterns: pricing one costs a tenth of generating it."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._seen: set[tuple[int, ...]] = set()
        self._patterns: Ints = np.zeros((0, num_layers + 1), dtype=np.int64)  # counts by capacity

    def add_columns(self, patterns: Iterable[Sequence[int]]) -> None:
        """Replicas found elsewhere, or in a pool much like the next one."""
        new = {tuple(sorted(pattern)) for pattern in patterns} - self._seen
        if not new:
            return
        self._seen |= new
        counts = np.zeros((len(new), self._num_layers + 1), dtype=np.int64)
        for row, pattern in zip(counts, sorted(new), strict=True):
            for capacity in pattern:
                row[capacity] += 1
        self._patterns = np.concatenate([self._patterns, counts])[-POLICY.cached_patterns :]

    def round_iteratively(
        self, capacities: Sequence[int], replicas: int, budget: WorkBudget
    ) -> list[Bin] | Dual | None:
        """`replicas` bins found by rounding the relaxation again and again, a proof that there are none, or None.

        `capacities`: what `match_pairs` leaves, sorted downwards.
        """
        fixed: list[Bin] = []
        rest = Counter(capacities)
        while rest:
            answer = self._solve(sorted(rest.elements(), reverse=True), replicas - len(fixed), budget)
            if not isinstance(answer, FractionalPacking):
                return None if fixed else answer
            self.add_columns(answer.patterns)
            taken = _whole_parts(answer, rest, replicas - len(fixed))
            fixed += taken
            found = _finish(fixed, sorted(rest.elements(), reverse=True), replicas, self._num_layers, budget)
            if found is not None:
                return found
            if not taken:
                largest = answer.patterns[max(range(len(answer.amounts)), key=answer.amounts.__getitem__)]
                if not _take(largest, 1, rest):
                    return None
                fixed.append(list(largest))
        return None

    def best_dual(self, capacities: Sequence[int], budget: WorkBudget) -> Dual | None:
        """The dual that leaves the least room above the replicas that `capacities` form; None when out of budget."""
        simplex = _Simplex(capacities, self._num_layers, self._patterns)
        return simplex.dual() if simplex.run(None, budget) is not None else None

    def _solve(self, capacities: Sequence[int], replicas: int, budget: WorkBudget) -> Dual | FractionalPacking | None:
        """A dual that rules out `replicas`, or fractions that form them, as far as rounding can tell; or None."""
        return _Simplex(capacities, self._num_layers, self._patterns).run(replicas, budget)


def _whole_parts(answer: FractionalPacking, rest: Counter[int], most: int) -> list[Bin]:
    """Bins for the whole part of each pattern's amount, taken out of `rest`."""
    taken: list[Bin] = []
    for pattern, amount in zip(answer.patterns, answer.amounts, strict=True):
        copies = min(int(amount + _TINY), most - len(taken))
        if copies > 0:
            taken.extend([list(pattern)] * _take(pattern, copies, rest))
    return taken


def _take(pattern: Sequence[int], copies: int, rest: Counter[int]) -> int:
    """Take the capacities of `pattern` out of `rest`, `copies` times or as often as they are there; -> how often."""
    needed = Counter(pattern)
    copies = min(copies, *(rest[c] // number for c, number in needed.items()))
    for capacity, number in needed.items():
        rest[capacity] -= copies * number
        if not rest[capacity]:
            del rest[capacity]
    return copies


def _finish(fixed: list[Bin], rest: list[int], replicas: int, num_layers: int, budget: WorkBudget) -> list[Bin] | None:
    """`fixed` and what `rest` forms heuristically; failing that, with repairs across both."""
    left = replicas - len(fixed)
    if left == 0:
        return fixed
    if len(rest) < left:
        return None
    bins = form(rest, left, num_layers, budget)
    if bins is not None:
        return fixed + bins
    bins = longest_first(rest, left) + fixed
    return bins if repair(bins, num_layers, budget) else None


@dataclass(frozen=True, slots=True)
class _Column:
    """`rows[i]` nodes of the i-th capacity: a replica, of value 1, or one node left out of all, of value 0."""

    value: float
    rows: Mapping[int, int]


class _Simplex:
    """Revised simplex for: maximise sum(y), patterns @ y <= counts, y >= 0. One row a distinct capacity."""

    def __init__(self, capacities: Sequence[int], num_layers: int, patterns: Ints) -> None:
        counts = Counter(capacities)
        self._sizes = sorted(counts, reverse=True)
        self._counts = [counts[c] for c in self._sizes]
        sizes = np.array(self._sizes, dtype=np.int64)
        self._left_after: Ints = np.maximum(np.arange(num_layers + 1)[:, None] - sizes, 0)  # [L + 1, rows]
        alone = -(-num_layers // sizes)  # the first basis: patterns of one capacity each
        self._basis = [_Column(1.0, {row: int(number)}) for row, number in enumerate(alone)]
        # [rows + 1, rows + 1]: the basis' inverse, beside it the amounts, below it the prices, in the corner the value
        self._tableau: Floats = np.zeros((len(sizes) + 1, len(sizes) + 1))
        self._amounts, self._prices = self._tableau[:-1, -1], self._tableau[-1, :-1]
        np.fill_diagonal(self._tableau[:-1, :-1], 1.0 / alone)
        self._amounts[:] = np.array(self._counts, dtype=np.float64) / alone
        self._prices[:] = 1.0 / alone
        self._tableau[-1, -1] = sum(self._amounts.tolist())
        absent = np.ones(num_layers + 1, dtype=bool)
        absent[sizes] = False
        self._cached: Ints = patterns[~patterns[:, absent].any(axis=1)][:, sizes]  # [patterns, rows]

    def run(self, replicas: int | None, budget: WorkBudget) -> Dual | FractionalPacking | None:
        """Improve until `replicas` are formed or ruled out, or the solution is the best; None when out of budget."""
        for _ in range(POLICY.max_pivots_per_row * len(self._sizes)):
            if replicas is not None and self.value() >= replicas - _TINY:
                break
            if not budget.spend(COSTS.pivot):
                return None
            column = self._slack() or self._cached_pattern()
            if column is None:
                if not budget.spend(len(self._left_after)):
                    return None
                prices = np.maximum(self._prices, 0.0)
                costs, choice = cover_costs(prices, self._left_after)
                proof = None if replicas is None else self._proof(float(costs[-1]), replicas)
                if proof is not None:
                    return proof
                if costs[-1] >= 1 - _TINY:
                    break
                self._cache_patterns(prices, costs, choice)
                column = _Column(1.0, self._pattern(choice, len(choice) - 1))
            if not self._pivot(column):
                break
        return self._packing()

    def value(self) -> float:
        """Replicas of the current solution."""
        return float(self._tableau[-1, -1])

    def _packing(self) -> FractionalPacking:
        chosen = [
            (tuple(self._sizes[row] for row in sorted(column.rows) for _ in range(column.rows[row])), amount)
            for amount, column in zip(self._amounts.tolist(), self._basis, strict=True)
            if column.value and amount > _TINY
        ]
        return FractionalPacking(tuple(pattern for pattern, _ in chosen), tuple(amount for _, amount in chosen))

    def _slack(self) -> _Column | None:
        """A row whose price is negative is better left slack."""
        row = int(self._prices.argmin())
        return _Column(0.0, {row: 1}) if self._prices[row] < -_TINY else None

    def _cached_pattern(self) -> _Column | None:
        """The most underpriced cached pattern, if one clearly is. In whole numbers, lest the order of sums matter."""
        if not len(self._cached):
            return None
        costs = self._cached @ (self._prices * _PRICE).astype(np.int64)
        cheapest = int(costs.argmin())
        if costs[cheapest] >= (1 - _CLEAR) * _PRICE:
            return None
        return _Column(1.0, {row: number for row, number in enumerate(self._cached[cheapest].tolist()) if number})

    def _pivot(self, column: _Column) -> bool:
        """Bring a column into the basis; False if no column can leave, which only rounding can cause."""
        tableau = self._tableau
        direction = np.zeros(len(tableau))
        for row, number in column.rows.items():
            direction += tableau[:, row] * number
        gain = column.value - float(direction[-1])
        direction[-1] = 0.0
        ratios = np.full(len(self._basis), np.inf)
        np.divide(self._amounts, direction[:-1], out=ratios, where=direction[:-1] > _TINY)
        leaving = int(ratios.argmin())
        if ratios[leaving] == np.inf:
            return False
        pivot_row = tableau[leaving] / direction[leaving]
        direction[leaving], direction[-1] = 0.0, -gain
        tableau -= direction[:, None] * pivot_row
        tableau[leaving] = pivot_row
        np.maximum(self._amounts, 0.0, out=self._amounts)
        self._basis[leaving] = column
        return True

    def _cache_patterns(self, prices: Floats, costs: Floats, choice: Ints) -> None:
        """The cheapest replicas with each capacity, if underpriced: the next pivots will use them."""
        ways = prices + costs[self._left_after[-1]]
        rows = [
            row
            for row in np.argsort(ways, kind="stable")[: POLICY.patterns_per_pricing].tolist()
            if ways[row] < 1 - _CLEAR
        ]
        counts = np.zeros((len(rows), len(self._sizes)), dtype=np.int64)
        for count, first in zip(counts, rows, strict=True):
            count[first] = 1
            for row, number in self._pattern(choice, int(self._left_after[-1, first])).items():
                count[row] += number
        self._cached = np.concatenate([self._cached, counts])

    def _pattern(self, choice: Ints, layers: int) -> dict[int, int]:
        """The cheapest capacities for `layers`, read off the last one chosen for each number of layers."""
        pattern: dict[int, int] = {}
        while layers > 0:
            row = int(choice[layers])
            pattern[row] = pattern.get(row, 0) + 1
            layers = int(self._left_after[layers, row])
        return pattern

    def _proof(self, cheapest: float, replicas: int) -> Dual | None:
        """The prices as a dual, if in whole numbers they rule out `replicas`; `cheapest` is the price of a replica."""
        worth = sum(n * max(price, 0.0) for n, price in zip(self._counts, self._prices.tolist(), strict=True))
        if worth >= (replicas - _CLEAR) * cheapest:
            return None
        dual = self.dual()
        weight = sum(n * dual.weights[c] for n, c in zip(self._counts, self._sizes, strict=True))
        return dual if weight < replicas * dual.total else None

    def dual(self) -> Dual:
        """The prices in whole numbers. A capacity not in the pool weighs as the next larger one, or as a replica."""
        whole = np.floor(np.maximum(self._prices, 0.0) * _PRICE).astype(np.int64)
        total = int(cover_costs(whole, self._left_after)[0][-1])
        known = dict(zip(self._sizes, whole.tolist(), strict=True))
        weights = [total] * len(self._left_after)
        for capacity in range(self._sizes[0], -1, -1):
            weights[capacity] = known.get(capacity, weights[min(capacity + 1, len(weights) - 1)])
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
