"""Parallax phase 1 (§3.2): how many replicas of the model a pool of nodes forms, and who serves which layers in them.

Owns the score Z(k) = k^alpha / (T_comp + s*(k)/k r_RTT), the regions, and the layout of the chosen replicas. That s*(k)
is the fewest nodes that form k replicas, and how it is found, is `allocation_stairs`'; shares inside a replica are
`balance`'s.

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
from swarm.planner.placement.water_filling import PoolNode, check_pool, fill, lay_out
from swarm.planner.placement.work_budget import WorkBudget
from swarm.types import Hop

_MOST_MS, _MOST_ALPHA = 1e30, 40.0  # keep scores of millions of replicas within a float
_FOR_OTHERS = 0.1  # of the budget that is left once the best k is settled
_TIE = 1e-9  # scores closer than this, relatively, are equal: `pow` may differ in the last bit between machines


@dataclass(frozen=True, slots=True)
class Objective:
    """What the score knows of time: `compute_ms` a replica takes on average (T_comp), `hop_ms` a stage adds (r_RTT).

    `alpha`: above 1 replicas count for more than their number. Raises UsageError.
    """

    compute_ms: float
    hop_ms: float
    alpha: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute_ms", "hop_ms"):
            value = getattr(self, name)
            if not 0 <= value <= _MOST_MS:
                raise UsageError(f"{name} is {value}; it must be milliseconds, from zero to {_MOST_MS:g}")
        if self.compute_ms + self.hop_ms < 1 / _MOST_MS:
            raise UsageError("compute_ms and hop_ms are both zero; the score needs one of them")
        if not 0 < self.alpha <= _MOST_ALPHA:
            raise UsageError(f"alpha is {self.alpha}; it must be above zero and at most {_MOST_ALPHA:g}")

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
    """The work that `allocate` does without a budget: enough to prove the best k of nearly every pool we drew."""
    return max(10_000, 40 * nodes)


def allocate(
    num_layers: int, nodes: Sequence[PoolNode], price: Objective, budget: WorkBudget | None = None
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
    pools, ladder = _search_k(
        num_layers, nodes, price, WorkBudget(default_steps(len(nodes))) if budget is None else budget
    )
    best = _best(ladder, price)
    stages, split = ladder.found[best]
    score = price.score(best, stages)
    score_bound = max(price.score(k, bound) for k, bound in enumerate(ladder.bounds) if k)
    groups = [group for pool, k in zip(pools, split, strict=False) for group in pool.form(k)]
    groups.sort(key=lambda group: (len(group), [node.id for node in group]))
    used = {node.id for group in groups for node in group}
    return Allocation(
        replicas=tuple(lay_out(group, fill(num_layers, group)[0]) for group in groups),
        unused=tuple(sorted(node.id for node in nodes if node.id not in used)),
        best_k=best,
        score=score,
        score_bound=max(score, score_bound),
        stages_by_k={k: ladder.found[k][0] for k in sorted(ladder.found) if k},
        gap_by_k={k: ladder.found[k][0] - ladder.bounds[k] for k in sorted(ladder.found) if k},
        exact=stages == ladder.bounds[best] and score_bound <= score * (1 + _TIE),
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
        """All that was found here, and on top of the most replicas of it those of `other`."""
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
        self._stairs = MinNodesByReplicas([self._capacity(node) for node in self._nodes], num_layers, budget)

    def _capacity(self, node: PoolNode) -> int:
        return min(node.layer_capacity, self._num_layers)

    @property
    def settled(self) -> bool:
        """Whether it is known how many replicas these nodes form at most, and with how many nodes."""
        return self._stairs.settled(self._stairs.most)

    def sharpen(self, price: Objective, budget: WorkBudget) -> None:
        """Settle which k scores best, then, with a share of what is left of the budget, s*(k) for every k.

        Hard ones are left until the easy ones are done.
        """
        for deep in (False, True):
            self._settle_best(price, budget, deep)
        rest = budget.share(_FOR_OTHERS)
        for deep in (False, True):
            for k in range(1, self._stairs.most + 1):
                self._stairs.sharpen(k, rest, deep)

    def _settle_best(self, price: Objective, budget: WorkBudget, deep: bool) -> None:
        """Work on each k whose bound scores more than what was found for any, the most promising first."""
        stairs = self._stairs
        best = max((price.score(k, stages) for k, stages in stairs.found()), default=0.0)
        for hope, k in sorted((-price.score(k, stairs.bound(k)), k) for k in range(1, stairs.most + 1)):
            if -hope < best:
                break
            if k > stairs.most or price.score(k, stairs.bound(k)) < best:  # known only since the others were worked on
                continue
            stairs.sharpen(k, budget, deep)
            stages = stairs.stages(k) if k <= stairs.most else None
            if stages is not None:
                best = max(best, price.score(k, stages))

    def ladder(self) -> _ReplicaBounds:
        stairs = self._stairs
        found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
        found |= {k: (stages, (k,)) for k, stages in stairs.found()}
        return _ReplicaBounds([0] + [stairs.bound(k) for k in range(1, stairs.most + 1)], found)

    def form(self, k: int) -> list[list[PoolNode]]:
        """The nodes of k replicas, the largest first in each; among equal capacities lower ids go first."""
        waiting: dict[int, list[PoolNode]] = {}
        for node in reversed(self._nodes):
            waiting.setdefault(self._capacity(node), []).append(node)
        bins = [sorted(members, reverse=True) for members in self._stairs.bins(k) or []]
        bins.sort(key=lambda members: (len(members), [-c for c in members]))
        return [[waiting[c].pop() for c in members] for members in bins]


def _search_k(
    num_layers: int, nodes: Sequence[PoolNode], price: Objective, budget: WorkBudget
) -> tuple[list[_Pool], _ReplicaBounds]:
    """-> the pools, one a region and one of what they leave over, and what they form together."""
    regions = sorted({node.region for node in nodes})
    turns = len(regions) if len(regions) == 1 else len(regions) + 1
    pools: list[_Pool] = []
    ladder = _ReplicaBounds([0], {0: (0, ())})
    for turn, region in enumerate(regions):
        share = budget.share(1 / (turns - turn))
        pools.append(_Pool(num_layers, (node for node in nodes if node.region == region), share))
        pools[-1].sharpen(price, share)
        ladder = ladder.beside(pools[-1].ladder())
    if len(pools) > 1:
        top = max(ladder.found)
        _, split = ladder.found[top]
        used = {n.id for pool, k in zip(pools, split, strict=True) for group in pool.form(k) for n in group}
        leftover = _Pool(num_layers, (node for node in nodes if node.id not in used), budget)
        leftover.sharpen(price, budget)
        ladder = ladder.below(leftover.ladder())
        if not all(pool.settled for pool in pools):
            # How many replicas the regions form is open, hence what they leave too: ask what holds without regions.
            capacities = sorted((min(node.layer_capacity, num_layers) for node in nodes), reverse=True)
            ladder = ladder.above(top, [0, *least_stages(capacities, num_layers)])
        pools.append(leftover)
    return pools, ladder


def _best(ladder: _ReplicaBounds, price: Objective) -> int:
    """The k with the highest score; of equal scores the one with the fewest stages."""
    scores = {k: price.score(k, stages) for k, (stages, _) in ladder.found.items() if k}
    enough = max(scores.values()) * (1 - _TIE)
    return min((ladder.found[k][0], k) for k, score in scores.items() if score >= enough)[1]
