"""s*(k), the fewest nodes that form k replicas, for every k at once: bounds proven from below, replicas from above.

Both s*(k) and the prefix that attains it come from one order: with capacities sorted downwards, k replicas need no node
outside the s*(k) largest (see `exact_dp`). A first, cheap pass finds replicas for every k, each from the ones
before; `tighten` then closes the gaps that are left, by proof or by a better find: the relaxation first, the dynamic
program where rounding the relaxation decides nothing.

Works on capacities only; nodes, regions and scores belong to `allocation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from swarm.planner.placement.bounds import Dual, least_stages
from swarm.planner.placement.column_generation import Relaxation
from swarm.planner.placement.exact_dp import decide
from swarm.planner.placement.greedy import Bin, extend, form, match_pairs, trim
from swarm.planner.placement.work_budget import WorkBudget


class MinNodesByReplicas:
    """For k = 1..`most`, the largest k not ruled out: `bound(k) <= s*(k) <= stages(k)`."""

    def __init__(self, capacities: Sequence[int], num_layers: int, budget: WorkBudget) -> None:
        """`capacities`: sorted downwards, each in 1..num_layers."""
        self._num_layers = num_layers
        self._whole = sum(1 for c in capacities if c == num_layers)  # nodes that are a replica each
        self._parts = list(capacities[self._whole :])
        self._bounds = least_stages(self._parts, num_layers)
        self._found: list[list[Bin] | None] = [None] * len(self._bounds)
        self._stages = [0] * len(self._bounds)  # nodes of `_found`
        self._proofs: list[Dual] = []
        self._relaxation = Relaxation(num_layers)
        self._rounded: set[tuple[int, int]] = set()  # (nodes, replicas) that rounding did not decide
        self._climb(budget.share(0.5))

    @property
    def most(self) -> int:
        return self._whole + len(self._bounds)

    def bound(self, k: int) -> int:
        """A proven lower bound on s*(k)."""
        return k if k <= self._whole else self._whole + self._bounds[k - self._whole - 1]

    def bins(self, k: int) -> list[Bin] | None:
        """The capacities of k replicas, or None if none were found for this k."""
        if k <= self._whole:
            return [[self._num_layers]] * k
        found = self._found[k - self._whole - 1]
        return None if found is None else [[self._num_layers]] * self._whole + found

    def stages(self, k: int) -> int | None:
        """How many nodes `bins(k)` has."""
        if k <= self._whole:
            return k
        parts = self._stages[k - self._whole - 1]
        return self._whole + parts if parts else None

    def found(self) -> list[tuple[int, int]]:
        """(k, `stages(k)`) for every k that replicas were found for."""
        return [(k, stages) for k in range(1, self.most + 1) if (stages := self.stages(k)) is not None]

    def exact(self, k: int) -> bool:
        """Whether s*(k) is proven."""
        return self.bound(k) == self.stages(k)

    def tighten(self, k: int, budget: WorkBudget, deep: bool) -> bool:
        """Work on s*(k) until it is proven, or k is ruled out; False if the budget or the searches give up before.

        `deep`: where rounding the relaxation decides nothing, run the dynamic program.
        """
        while k <= self.most and not self.exact(k):
            row = k - self._whole - 1
            if not budget.spend(self._bounds[row]):
                return False
            near = self._one_less(row) or self._one_more(row, budget)
            if near is not None:
                self._keep(row, near)
                continue
            pairs, rest = match_pairs(self._parts[: self._bounds[row]], self._num_layers)
            self._relaxation.add_columns(next((bins for bins in reversed(self._found[: row + 1]) if bins), ()))
            answer = self._decide(rest, row + 1 - len(pairs), budget, deep)
            if answer is None:
                return False
            if isinstance(answer, list):
                self._keep(row, (pairs + answer)[: row + 1])
            else:
                self._raise_bound(row)
        return True

    def _one_more(self, row: int, budget: WorkBudget) -> list[Bin] | None:
        """Replicas for `row` from those of the one before, if they are known to need the fewest nodes."""
        smaller = self._found[row - 1] if row else None
        if smaller is None or self._stages[row - 1] != self._bounds[row - 1]:
            return None
        extra = self._parts[self._bounds[row - 1] : self._bounds[row]]
        grown = extend(smaller, [sum(members) for members in smaller], extra, self._num_layers, budget)
        return None if grown is None else grown[0]

    def _one_less(self, row: int) -> list[Bin] | None:
        """Replicas for `row` from those of the next, if one of them has as many nodes as the two bounds are apart.

        Drop that one. What is left may use nodes outside the prefix: members of the prefix that are now free, none of
        them smaller, take their places.
        """
        larger = self._found[row + 1] if row + 1 < len(self._found) else None
        if larger is None:
            return None
        longest = max(range(len(larger)), key=lambda i: len(larger[i]))
        if self._stages[row + 1] - len(larger[longest]) > self._bounds[row]:
            return None
        bins = larger[:longest] + larger[longest + 1 :]
        prefix, used = Counter(self._parts[: self._bounds[row]]), Counter(chain.from_iterable(bins))
        outside, free = used - prefix, list((prefix - used).elements())
        for i, members in enumerate(bins):
            if outside.keys().isdisjoint(members):
                continue
            bins[i] = list(members)
            for j, capacity in enumerate(members):
                if outside[capacity]:
                    outside[capacity] -= 1
                    bins[i][j] = free.pop()
        return bins

    def _decide(self, rest: Sequence[int], replicas: int, budget: WorkBudget, deep: bool) -> list[Bin] | bool | None:
        """`replicas` bins out of `rest`, False if there are none, None if unknown."""
        if any(proof.replicas(rest) < replicas for proof in reversed(self._proofs)):
            return False
        if replicas <= 0:
            return []
        if (len(rest), replicas) not in self._rounded:
            answer = self._relaxation.round_iteratively(rest, replicas, budget)
            if isinstance(answer, Dual):
                self._proofs.append(answer)
                return False
            if answer is not None:
                return answer
            self._rounded.add((len(rest), replicas))
        if not deep:
            return None
        dual = self._relaxation.best_dual(rest, budget)
        return None if dual is None else decide(rest, replicas, self._num_layers, budget, [dual])

    def _raise_bound(self, row: int) -> None:
        """The bound of `row` fails: it and, where needed, those above go up by one; drop what leaves the pool."""
        self._bounds[row] += 1
        for above in range(row + 1, len(self._bounds)):
            if self._bounds[above] > self._bounds[above - 1]:
                break
            self._bounds[above] += 1
        while self._bounds and self._bounds[-1] > len(self._parts):
            self._bounds.pop()
            self._found.pop()
            self._stages.pop()

    def _climb(self, budget: WorkBudget) -> None:
        """Find replicas for k = 1, 2, ... each in the shortest prefix for which the heuristics find them."""
        bins: list[Bin] = []
        loads: list[int] = []
        used, tight = 0, True  # gaps come in runs: after one, leave starting afresh to `tighten`
        for row, bound in enumerate(self._bounds):
            for end in range(bound, len(self._parts) + 1):
                grown = extend(bins, loads, self._parts[used:end], self._num_layers, budget) if end > used else None
                if grown is None and tight and not budget.spent:
                    formed = form(self._parts[:end], row + 1, self._num_layers, budget)
                    grown = None if formed is None else (formed, [sum(members) for members in formed])
                if grown is not None:
                    break
            else:
                return
            bins, loads = grown
            used, tight = end, end == bound
            self._keep(row, bins if tight else trim(bins, loads, self._num_layers))

    def _keep(self, row: int, bins: list[Bin]) -> None:
        self._found[row] = bins
        self._stages[row] = sum(map(len, bins))
