"""Parallax phase 1 (§3.2): how many replicas of the model a pool of nodes forms, and which node serves which layers.

Owns the score Z(k) = k^alpha / (T_comp + s*(k)/k r_RTT), the regions, and the layout of the chosen replicas. s*(k),
the fewest nodes that form k replicas, is found by `min_nodes`; shares inside a replica are computed by `water_filling`.

Regions. As in the paper, a replica stays within one region: each region has its own s*(k), and the swarm's is their
best combination. Departure: what is left once every region forms as many replicas as it can is pooled, and further
replicas across regions compete by the same score, since a swarm whose regions are each too small could serve nothing.
Nodes of unknown region form a region of their own.

Ties: fewer stages, then lower node ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import Infeasible, UsageError
from swarm.planner.placement.bounds import least_stages
from swarm.planner.placement.min_nodes import MinNodesByReplicas
from swarm.planner.placement.policy import POLICY
from swarm.planner.placement.water_filling import PoolNode, check_pool, fill, lay_out
from swarm.planner.placement.work_budget import WorkBudget
from swarm.types import Hop

_MAX_MS, _MAX_ALPHA = 1e30, 40.0  # keep scores of millions of replicas within a float
_TIE = 1e-9  # scores closer than this, relatively, are equal: `pow` may differ in the last bit between machines


@dataclass(frozen=True, slots=True)
class Objective:
    """The times of the score: `compute_ms` a replica takes on average (T_comp), `hop_ms` a stage adds (r_RTT).

    `alpha`: above 1 replicas count for more than their number. Raises UsageError.
    """

    compute_ms: float
    hop_ms: float
    alpha: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute_ms", "hop_ms"):
            value = getattr(self, name)
            if not 0 <= value <= _MAX_MS:
                raise UsageError(f"{name} is {value}; it must be milliseconds, from zero to {_MAX_MS:g}")
        if self.compute_ms + self.hop_ms < 1 / _MAX_MS:
            raise UsageError("compute_ms and hop_ms are both zero; the score needs one of them")
        if not 0 < self.alpha <= _MAX_ALPHA:
            raise UsageError(f"alpha is {self.alpha}; it must be above zero and at most {_MAX_ALPHA:g}")

    def score(self, replicas: int, stages: int) -> float:
        """Z(k), for `stages` nodes in all `replicas` together."""
        return float(replicas**self.alpha / (self.compute_ms + stages / replicas * self.hop_ms))


@dataclass(frozen=True, slots=True)
class Allocation:
    """The replicas of the best k. Each covers `[0, num_layers)` once, in order; no node is in two of them.

    `stages_by_k[k]` nodes form k replicas, at most `gap_by_k[k]` more than the fewest that could; 0 is proven optimal.
    `score_bound`: no allocation that keeps to the regions scores more. `exact`: nor does any score more than this one.
    Where it is False the work budget ran out and `replicas` are a greedy plan, within `gap` of the best.
    """

    replicas: tuple[tuple[Hop, ...], ...]
    unused: tuple[str, ...]
    best_k: int
    score: float
    score_bound: float
    stages_by_k: Mapping[int, int]
    gap_by_k: Mapping[int, int]
    exact: bool

    @property
    def gap(self) -> float:
        """How much more, relatively, the best allocation could score."""
        return 0.0 if self.exact else self.score_bound / self.score - 1.0


def default_steps(nodes: int) -> int:
    """The work of `allocate` without a budget: enough to prove the best k of nearly every random pool tried."""
    return max(POLICY.min_steps, POLICY.steps_per_node * nodes)


def allocate(
    num_layers: int, nodes: Sequence[PoolNode], objective: Objective, budget: WorkBudget | None = None
) -> Allocation:
    """Choose k and form k replicas of `num_layers` layers. Raises Infeasible if there is no room for one, UsageError.

    Nodes of a replica are in pipeline order, the largest first. Without a `budget` there are `default_steps`.
    """
    check_pool(num_layers, nodes)
    held = sum(node.layer_capacity for node in nodes)
    if held < num_layers:
        raise Infeasible(
            f"{len(nodes)} nodes hold {held} of {num_layers} layers; {num_layers - held} layers of memory are missing"
        )
    budget = WorkBudget(default_steps(len(nodes))) if budget is None else budget
    pools, bounds = _search_k(num_layers, nodes, objective, budget)
    best = _best(bounds, objective)
    stages, split = bounds.found[best]
    score = objective.score(best, stages)
    score_bound = max(objective.score(k, bound) for k, bound in enumerate(bounds.bounds) if k)
    groups = [group for pool, k in zip(pools, split, strict=False) for group in pool.form(k)]
    groups.sort(key=lambda group: (len(group), [node.id for node in group]))
    used = {node.id for group in groups for node in group}
    return Allocation(
        replicas=tuple(lay_out(group, fill(num_layers, group)[0]) for group in groups),
        unused=tuple(sorted(node.id for node in nodes if node.id not in used)),
        best_k=best,
        score=score,
        score_bound=max(score, score_bound),
        stages_by_k={k: bounds.found[k][0] for k in sorted(bounds.found) if k},
        gap_by_k={k: bounds.found[k][0] - bounds.bounds[k] for k in sorted(bounds.found) if k},
        exact=stages == bounds.bounds[best] and score_bound <= score * (1 + _TIE),
    )


@dataclass(frozen=True, slots=True)
class _ReplicaBounds:
    """`bounds[k]`: nodes that k replicas need at least; `found[k]`: nodes that form them, and k by pool."""

    bounds: list[int]
    found: dict[int, tuple[int, tuple[int, ...]]]

    def beside(self, other: _ReplicaBounds) -> _ReplicaBounds:
        """The best over all ways to split k replicas between two pools."""
        bounds = [
            min(self.bounds[i] + other.bounds[k - i] for i in range(max(0, k - other.most), min(k, self.most) + 1))
            for k in range(self.most + other.most + 1)
        ]
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for i, (left, left_split) in self.found.items():
            for j, (right, right_split) in other.found.items():
                if i + j not in found or left + right < found[i + j][0]:
                    found[i + j] = left + right, left_split + right_split
        return _ReplicaBounds(bounds, found)

    def below(self, other: _ReplicaBounds) -> _ReplicaBounds:
        """What was found here, and on top of its most replicas those of `other`."""
        top = max(self.found)
        stages, split = self.found[top]
        more = {top + k: (stages + above, split + by_pool) for k, (above, by_pool) in other.found.items() if k}
        bounds = self.bounds[: top + 1] + [stages + bound for bound in other.bounds[1:]]
        return _ReplicaBounds(bounds, self.found | more)

    def above(self, k: int, bounds: Sequence[int]) -> _ReplicaBounds:
        """With `bounds` instead of its own for more than k replicas."""
        return _ReplicaBounds(self.bounds[: k + 1] + list(bounds[k + 1 :]), self.found)

    @property
    def most(self) -> int:
        return len(self.bounds) - 1


class _Pool:
    """Nodes that form replicas among themselves."""

    def __init__(self, num_layers: int, nodes: Iterable[PoolNode], budget: WorkBudget) -> None:
        self._num_layers = num_layers
        self._nodes = sorted((n for n in nodes if n.layer_capacity), key=lambda n: (-self._capacity(n), n.id))
        self._min_nodes = MinNodesByReplicas([self._capacity(node) for node in self._nodes], num_layers, budget)

    def _capacity(self, node: PoolNode) -> int:
        return min(node.layer_capacity, self._num_layers)

    @property
    def exact(self) -> bool:
        """Whether the most replicas that these nodes form, and their fewest nodes, are proven."""
        return self._min_nodes.exact(self._min_nodes.most)

    def tighten(self, objective: Objective, budget: WorkBudget) -> None:
        """Prove which k scores best, then, with a share of what is left of the budget, s*(k) for every k.

        Hard ones are left until the easy ones are done.
        """
        for deep in (False, True):
            self._prove_best(objective, budget, deep)
        rest = budget.share(POLICY.share_for_other_k)
        for deep in (False, True):
            for k in range(1, self._min_nodes.most + 1):
                self._min_nodes.tighten(k, rest, deep)

    def _prove_best(self, objective: Objective, budget: WorkBudget, deep: bool) -> None:
        """Work on each k whose bound scores more than what was found for any, the highest bound first."""
        nodes = self._min_nodes
        best = max((objective.score(k, stages) for k, stages in nodes.found()), default=0.0)
        for negative, k in sorted((-objective.score(k, nodes.bound(k)), k) for k in range(1, nodes.most + 1)):
            if -negative < best:
                break
            if k > nodes.most or objective.score(k, nodes.bound(k)) < best:  # as work on the others has shown
                continue
            nodes.tighten(k, budget, deep)
            stages = nodes.stages(k) if k <= nodes.most else None
            if stages is not None:
                best = max(best, objective.score(k, stages))

    def replica_bounds(self) -> _ReplicaBounds:
        nodes = self._min_nodes
        found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
        found |= {k: (stages, (k,)) for k, stages in nodes.found()}
        return _ReplicaBounds([0] + [nodes.bound(k) for k in range(1, nodes.most + 1)], found)

    def form(self, k: int) -> list[list[PoolNode]]:
        """The nodes of k replicas, the largest first in each; among equal capacities lower ids go first."""
        by_capacity: dict[int, list[PoolNode]] = {}
        for node in reversed(self._nodes):
            by_capacity.setdefault(self._capacity(node), []).append(node)
        bins = [sorted(members, reverse=True) for members in self._min_nodes.bins(k) or []]
        bins.sort(key=lambda members: (len(members), [-c for c in members]))
        return [[by_capacity[c].pop() for c in members] for members in bins]


def _search_k(
    num_layers: int, nodes: Sequence[PoolNode], objective: Objective, budget: WorkBudget
) -> tuple[list[_Pool], _ReplicaBounds]:
    """-> the pools, one per region and one of what they leave over, and the bounds of all together."""
    regions = sorted({node.region for node in nodes})
    shares = len(regions) if len(regions) == 1 else len(regions) + 1
    pools: list[_Pool] = []
    bounds = _ReplicaBounds([0], {0: (0, ())})
    for i, region in enumerate(regions):
        share = budget.share(1 / (shares - i))
        pools.append(_Pool(num_layers, (node for node in nodes if node.region == region), share))
        pools[-1].tighten(objective, share)
        bounds = bounds.beside(pools[-1].replica_bounds())
    if len(pools) > 1:
        top = max(bounds.found)
        _, split = bounds.found[top]
        used = {n.id for pool, k in zip(pools, split, strict=True) for group in pool.form(k) for n in group}
        leftover = _Pool(num_layers, (node for node in nodes if node.id not in used), budget)
        leftover.tighten(objective, budget)
        bounds = bounds.below(leftover.replica_bounds())
        if not all(pool.exact for pool in pools):
            # How many replicas the regions form is unproven, hence what they leave too: use bounds without regions.
            capacities = sorted((min(node.layer_capacity, num_layers) for node in nodes), reverse=True)
            bounds = bounds.above(top, [0, *least_stages(capacities, num_layers)])
        pools.append(leftover)
    return pools, bounds


def _best(bounds: _ReplicaBounds, objective: Objective) -> int:
    """The k with the highest score; of equal scores the one with the fewest stages."""
    scores = {k: objective.score(k, stages) for k, (stages, _) in bounds.found.items() if k}
    enough = max(scores.values()) * (1 - _TIE)
    return min((bounds.found[k][0], k) for k, score in scores.items() if score >= enough)[1]
