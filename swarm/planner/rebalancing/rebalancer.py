"""A node's slow loop as events in, actions out: when this node should change its layers for the swarm's sake.

Owns patience: how long a trigger must last, how much a move must gain, how long to rest after one, so that the swarm
does not thrash. What triggers and where to go is `rebalance`'s; time comes with the events; moving is the node's.

Each trigger has a clock of its own: every layer that nobody holds, and the imbalance. What else changes in the swarm
meanwhile stops none of them, so a swarm in which somebody always comes or goes heals like a quiet one. Nor is anything
asked of nodes that have come only just now: they have not waited, and some will be gone before they have.

Every node runs its own keeper. They agree without talking: the target is the same for all who read the same snapshot,
and only the moves of its first wave are safe to make now, so a node moves when its own move is in that wave, and has
been for as long as others may be reading older snapshots. The next wave follows from the next snapshots: whoever is
still in the wrong place then finds itself in a first wave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarm.errors import Infeasible
from swarm.planner.placement.join import place_joiners, uncovered_without
from swarm.planner.rebalancing.imbalance import ALPHA, THRESHOLD, judge_spans
from swarm.planner.rebalancing.migration import SpanMove
from swarm.planner.rebalancing.target import TargetAllocation, target_allocation
from swarm.types import LayerSpan, NodeState, PeerId, Snapshot, coverage


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """`coverage_timeout_s`, `patience_s`: how long a layer must lack a node, or the loads differ, without a break.

    A gap that joining nodes are about to fill is given `patience_s` too, and every move a node has made in the last
    `cooldown_s` doubles its patience with gaps, up to `patience_s`. A gap that is only foretold, because those who serve
    the layers say that they leave, needs no patience but `stability_s`.

    `stability_s`: how long a node must find its own move in the first wave before it makes it; longer than a record takes
    to reach everybody, and not asked of a gap that has outlasted twice its patience. `cooldown_s`: after a move of its own
    a node makes no other for balance. `min_gain`: relative fall of the coefficient of variation for which moving is
    worth while.
    """

    alpha: float = ALPHA
    threshold: float = THRESHOLD
    coverage_patience_s: float = 6.0
    patience_s: float = 30.0
    settle_s: float = 2.0
    rest_s: float = 300.0
    min_gain: float = 0.2


@dataclass(frozen=True, slots=True)
class RebalanceDecision:
    """`move`: what this node should do now, None to stay. `reason`: why, for people. `seen`: what it follows from."""

    move: SpanMove | None
    reason: str
    seen: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class _Trigger:
    """What asks for a move: `gap` or imbalance; since when, and how long that must last."""

    gap: bool
    since: float
    timeout_s: float
    reason: str


class Rebalancer:
    """One node's keeper; `observe` it with every snapshot of nodes that share its weights and dtype."""

    def __init__(self, me: PeerId, policy: RebalancePolicy | None = None) -> None:
        self._me = me
        self._policy = RebalancePolicy() if policy is None else policy
        self._uncovered_since: Mapping[int, float] = {}  # layer that nobody holds -> since when
        self._uneven_since: float | None = None
        self._target_since: float | None = None  # since when this node's own move has been in the first wave
        self._moved_at: tuple[float, ...] = ()  # own moves, while they matter
        self._seen: Mapping[PeerId, float] = {}  # since when each node has been there
        self._places: tuple[tuple[PeerId, NodeState, LayerSpan | None, bool], ...] = ()
        self._target: TargetAllocation | None = None  # for these places; worked out when patience runs out
        self._aimed_at: Snapshot | None = None  # what it was worked out from

    def observe(self, snapshot: Snapshot, now: float) -> RebalanceDecision:
        """`now`: seconds of any clock that does not go back."""
        self._seen = {n.peer: self._seen.get(n.peer, now) for n in snapshot.nodes}
        self._moved_at = tuple(at for at in self._moved_at if now - at < self._policy.rest_s)
        trigger, reason = self._trigger(snapshot, now)
        decision = RebalanceDecision(None, reason) if trigger is None else self._answer(trigger, snapshot, now)
        if trigger is None or decision.move is None:
            self._target_since = None
            return decision
        return self._is_stable(trigger, decision, now)

    def moved(self, now: float) -> None:
        """This node has begun a move."""
        self._moved_at = (*self._moved_at, now)

    def _trigger(self, snapshot: Snapshot, now: float) -> tuple[_Trigger | None, str]:
        """Keep the clocks; what asks for a move, if anything does, and how things stand."""
        policy = self._policy
        nodes = {n.peer: n for n in snapshot.nodes if not n.departing}
        spans = {peer: n.span for peer, n in nodes.items() if n.span is not None}
        held = coverage(spans.values(), snapshot.num_layers)
        self._uncovered_since = {
            layer: self._uncovered_since.get(layer, now) for layer, count in enumerate(held) if not count
        }
        spans |= place_joiners(snapshot)  # who joins now will fill what it can without anybody moving
        verdict = judge_spans(nodes, spans, snapshot.num_layers, policy.alpha, policy.threshold)
        if verdict.cv <= policy.threshold:
            self._uneven_since = None
        elif self._uneven_since is None:
            self._uneven_since = now
        if self._uncovered_since:
            since = min(self._uncovered_since.values())
            if not all(coverage(spans.values(), snapshot.num_layers)):
                foretold = all(snapshot.coverage()[layer] for layer in self._uncovered_since)
                patience_s = min(policy.coverage_patience_s * 2 ** len(self._moved_at), policy.patience_s)
                patience_s = policy.settle_s if foretold else patience_s
                return _Trigger(True, since, patience_s, verdict.reason), verdict.reason
            reason = "coverage: only nodes that are joining would hold some layers"
            return _Trigger(True, since, policy.patience_s, reason), reason
        if self._uneven_since is not None:
            return _Trigger(False, self._uneven_since, policy.patience_s, verdict.reason), verdict.reason
        return None, verdict.reason

    def _answer(self, trigger: _Trigger, snapshot: Snapshot, now: float) -> RebalanceDecision:
        mine = snapshot.node(self._me)
        if mine is None or mine.state is not NodeState.SERVING:
            return RebalanceDecision(None, "this node is not serving")
        if mine.pinned:
            return RebalanceDecision(None, "the layers of this node were chosen by hand")
        if now - trigger.since < trigger.timeout_s:
            return RebalanceDecision(None, f"{trigger.reason}; waiting to see whether it lasts")
        if not trigger.gap and self._moved_at:
            return RebalanceDecision(None, f"{trigger.reason}; this node has moved not long ago")
        new = now - self._policy.coverage_patience_s
        staying = [replace(n, pinned=True) if n.span and self._seen[n.peer] > new else n for n in snapshot.nodes]
        return self._recompute_target(trigger, replace(snapshot, nodes=tuple(staying)))

    def _is_stable(self, trigger: _Trigger, decision: RebalanceDecision, now: float) -> RebalanceDecision:
        """`decision`, once this node has wanted to move for long enough."""
        if self._target_since is None:
            self._target_since = now
        overdue = trigger.gap and now - trigger.since >= 2 * trigger.timeout_s
        if overdue or now - self._target_since >= self._policy.settle_s:
            return decision
        return RebalanceDecision(None, f"{decision.reason}; waiting until everybody sees it so")

    def _recompute_target(self, trigger: _Trigger, snapshot: Snapshot) -> RebalanceDecision:
        places = tuple((n.peer, n.state, n.span, n.pinned) for n in snapshot.nodes)
        if places != self._places:
            self._places, self._target = places, None
        if self._target is None:
            try:
                self._target = target_allocation(snapshot, self._policy.alpha, self._policy.threshold)
                self._aimed_at = snapshot
            except Infeasible as error:
                return RebalanceDecision(None, f"{error}; nothing to gain by moving")
        aim = self._target
        better = aim.after.cv <= aim.before.cv * (1.0 - self._policy.min_gain)
        if not trigger.gap and not better:
            gain = f"from {aim.before.cv:.2f} to {aim.after.cv:.2f}"
            return RebalanceDecision(None, f"{trigger.reason}; but the best allocation would only bring it {gain}")
        first = self._first_wave(aim, snapshot)
        move = next((m for m in first if m.peer == self._me), None)
        if move is None or move.old is None:
            return RebalanceDecision(None, f"{trigger.reason}; it is for others to move")
        return RebalanceDecision(move, f"{trigger.reason}; layers {move.old} -> {move.new}", self._aimed_at)

    def _first_wave(self, aim: TargetAllocation, snapshot: Snapshot) -> tuple[SpanMove, ...]:
        """The moves to make now: of those that are safe together, the ones that fill a gap if any do.

        A wave that uncovers layers is one that can only go all at once.
        """
        first = aim.plan.waves[0] if aim.plan.waves else ()
        if uncovered_without(snapshot, {m.peer for m in first}):
            return first
        return tuple(m for m in first if any(layer in m.new for layer in self._uncovered_since)) or first
