"""Parallax's phase-1 dynamic program (§3.2), deciding whether given capacities can form k replicas.

The state is the paper's: a cursor into the sorted capacities and the sorted residuals of the replicas begun, with
back-pointers. What differs, each change sound:
- no capacity is skipped. Swapping a used capacity for a larger unused one never hurts, so s*(k) is the shortest prefix
  of the sorted capacities that forms k replicas, and skipping is left to the caller, who tries prefix after prefix;
- a capacity that meets a residual exactly completes it, for the reason given at `greedy.match_pairs`;
- each dual function (`bounds`) measures waste: what a step adds in weight beyond what it saves in the weight
  still needed. A step is cut when its waste exceeds the slack of any of the duals;
- the search is depth first, least waste first, and states that failed are not entered again, nor are those they
  dominate: the same cursor and residuals with more replicas still to begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarm.planner.placement.bounds import Dual, rounding_dual_rows
from swarm.planner.placement.column_generation import cover_costs
from swarm.planner.placement.greedy import Bin
from swarm.planner.placement.policy import COSTS, POLICY
from swarm.planner.placement.work_budget import WorkBudget

Slack = tuple[int, ...]
Residuals = tuple[int, ...]


def decide(
    capacities: Sequence[int], replicas: int, num_layers: int, budget: WorkBudget, proofs: Sequence[Dual] = ()
) -> list[Bin] | bool | None:
    """`replicas` bins out of `capacities` (sorted downwards, each below L), False if there are none, None if unknown.

    `proofs`: duals found elsewhere that may cut the search short.
    """
    duals = [*proofs, *rounding_dual_rows(capacities, num_layers, replicas, POLICY.waste_duals)]
    metrics = [_Metric(dual, capacities, num_layers) for dual in duals]
    slack = tuple(metric.slack(capacities, replicas) for metric in metrics)
    if min(slack) < 0:
        return False
    path = _Search(capacities, num_layers, metrics, budget).run(replicas, slack)
    return path if path is None or isinstance(path, bool) else _bins(capacities, path, num_layers)


class _Metric:
    """One dual as a measure of waste: `need[r]` is the least weight that completes a replica short of r layers."""

    def __init__(self, dual: Dual, capacities: Sequence[int], num_layers: int) -> None:
        sizes = np.array(sorted(set(capacities), reverse=True), dtype=np.int64)
        left_after = np.maximum(np.arange(num_layers + 1)[:, None] - sizes, 0)
        costs, _ = cover_costs(np.array(dual.weights, dtype=np.int64)[sizes], left_after)
        self.weights = dual.weights
        self.need: list[int] = costs.tolist()

    def slack(self, capacities: Sequence[int], replicas: int) -> int:
        return sum(self.weights[c] for c in capacities) - replicas * self.need[-1]

    def waste(self, residual: int, capacity: int) -> int:
        return self.weights[capacity] - self.need[residual] + self.need[max(residual - capacity, 0)]


@dataclass(slots=True)
class _Frame:
    """A state on the current path and the steps from it not yet tried, the best last."""

    residuals: Residuals
    to_begin: int
    slack: Slack
    steps: list[int]  # the residual that the capacity at the cursor goes to; L begins a replica
    taken: int = 0


class _Search:
    def __init__(self, capacities: Sequence[int], num_layers: int, metrics: list[_Metric], budget: WorkBudget) -> None:
        self._capacities = capacities
        self._num_layers = num_layers
        self._metrics = metrics
        self._budget = budget
        self._wastes: dict[tuple[int, int], Slack] = {}
        self._failed: dict[tuple[int, Residuals], int] = {}  # -> the fewest replicas to begin that failed

    def run(self, replicas: int, slack: Slack) -> list[int] | bool | None:
        """The residual each capacity went to, False if the search is exhausted, None if the budget is."""
        path = [self._frame(0, (), replicas, slack)]
        while path:
            frame = path[-1]
            cursor = len(path) - 1
            if not frame.residuals and not frame.to_begin:
                return [step.taken for step in path[:-1]]
            if not frame.steps:
                self._failed[cursor, frame.residuals] = frame.to_begin
                path.pop()
                continue
            if not self._budget.spend(COSTS.dp_state):
                return None
            frame.taken = frame.steps.pop()
            after = self._after(frame, self._capacities[cursor])
            known = self._failed.get((cursor + 1, after[0]))
            if known is None or after[1] < known:
                path.append(self._frame(cursor + 1, *after))
        return False

    def _frame(self, cursor: int, residuals: Residuals, to_begin: int, slack: Slack) -> _Frame:
        if cursor == len(self._capacities):
            return _Frame(residuals, to_begin, slack, [])
        return _Frame(residuals, to_begin, slack, self._steps(self._capacities[cursor], residuals, to_begin, slack))

    def _steps(self, capacity: int, residuals: Residuals, to_begin: int, slack: Slack) -> list[int]:
        """The residuals `capacity` may go to, the one that wastes the least share of the slack last."""
        if capacity in residuals:
            return [capacity]
        targets = sorted(set(residuals))
        if to_begin:
            targets.append(self._num_layers)
        ranked = []
        for residual in targets:
            waste = self._waste(residual, capacity)
            if all(w <= s for w, s in zip(waste, slack, strict=True)):
                share = sum(w / (s + 1) for w, s in zip(waste, slack, strict=True))
                ranked.append((-share, residual))
        ranked.sort()
        return [residual for _, residual in ranked]

    def _after(self, frame: _Frame, capacity: int) -> tuple[Residuals, int, Slack]:
        residuals, to_begin = list(frame.residuals), frame.to_begin
        if frame.taken == self._num_layers:
            to_begin -= 1
        else:
            residuals.remove(frame.taken)
        if frame.taken > capacity:
            residuals.append(frame.taken - capacity)
            residuals.sort()
        waste = self._waste(frame.taken, capacity)
        return tuple(residuals), to_begin, tuple(s - w for s, w in zip(frame.slack, waste, strict=True))

    def _waste(self, residual: int, capacity: int) -> Slack:
        waste = self._wastes.get((residual, capacity))
        if waste is None:
            waste = tuple(metric.waste(residual, capacity) for metric in self._metrics)
            self._wastes[residual, capacity] = waste
        return waste


def _bins(capacities: Sequence[int], path: Sequence[int], num_layers: int) -> list[Bin]:
    """Replay the back-pointers: `path[i]` is the residual that capacity i went to."""
    unfinished: dict[int, list[Bin]] = {}
    bins: list[Bin] = []
    for capacity, residual in zip(capacities, path, strict=False):  # the smallest may be left over
        if residual == num_layers:
            members: Bin = []
            bins.append(members)
        else:
            members = unfinished[residual].pop()
        members.append(capacity)
        if residual > capacity:
            unfinished.setdefault(residual - capacity, []).append(members)
    return bins
