"""Rebalancing, one node's side: snapshots in, decisions out, when this node should change its layers.

Owns the hysteresis: how long a trigger must last, how much a move must gain, and the cooldown after one, so that the
swarm does not thrash. The triggers are in `imbalance`, the target allocation in `target`; time comes with the
snapshots; the node carries out the move.

Each trigger has a timer of its own: every uncovered layer, and the imbalance. Other changes in the swarm reset none of
them, so a swarm with constant churn heals like a quiet one. Nodes that have just joined are not moved: some of them
will be gone before a timeout has passed.

Every node runs its own rebalancer. They agree without messages: the target is the same for all that read the same
snapshot, and only the moves of its first wave are safe to make now, so a node moves when its own move is in that wave,
and has been for as long as others may be reading older snapshots. The next wave follows from the next snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarm.errors import Infeasible
from swarm.planner.placement.join import place_joiners, uncovered_without
from swarm.planner.rebalancing.imbalance import ImbalanceVerdict, judge_spans
from swarm.planner.rebalancing.migration import SpanMove
from swarm.planner.rebalancing.policy import POLICY, RebalancePolicy
from swarm.planner.rebalancing.target import TargetAllocation, target_allocation
from swarm.planner.trust.doubts import NONE, Doubts
from swarm.types import LayerSpan, NodeState, PeerId, Snapshot, coverage


@dataclass(frozen=True, slots=True)
class RebalanceDecision:
    """`move`: what this node should do now, None to stay. `reason`: for people. `seen`: the snapshot it is based on."""

    move: SpanMove | None
    reason: str
    seen: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class _Trigger:
    """Why to move: a coverage `gap` or imbalance; since when, and how long it must last."""

    gap: bool
    since: float
    timeout_s: float
    reason: str


class Rebalancer:
    """Of one node; `observe` takes every snapshot of the nodes that share its weights and dtype."""

    def __init__(self, me: PeerId, policy: RebalancePolicy | None = None) -> None:
        self._me = me
        self._policy = policy or POLICY
        self._uncovered_since: Mapping[int, float] = {}  # uncovered layer -> since when
        self._uneven_since: float | None = None
        self._target_since: float | None = None  # since when this node's own move has been in the first wave
        self._moved_at: tuple[float, ...] = ()  # own moves, while they matter
        self._firm: Snapshot | None = None  # the last snapshot without the nodes that are doubted
        self._seen: Mapping[PeerId, float] = {}  # since when each node has been in snapshots
        self._places: tuple[tuple[PeerId, NodeState, LayerSpan | None, bool], ...] = ()
        self._target: TargetAllocation | None = None  # for these places; computed once a timeout has passed
        self._target_snapshot: Snapshot | None = None  # what it was computed from

    def observe(self, snapshot: Snapshot, now: float, doubts: Doubts = NONE) -> RebalanceDecision:
        """`now`: seconds of any clock that does not go back. `doubts`: nodes that this one does not build on: silent
        ones count as absent, and for new ones alone it does not move, nor leaves them its layers."""
        snapshot, self._firm = doubts.believed(snapshot), doubts.firm(snapshot)
        self._seen = {n.peer: self._seen.get(n.peer, now) for n in snapshot.nodes}
        self._moved_at = tuple(at for at in self._moved_at if now - at < self._policy.cooldown_s)
        trigger, reason = self._trigger(snapshot, now)
        decision = RebalanceDecision(None, reason) if trigger is None else self._decide(trigger, snapshot, now)
        if trigger is None or decision.move is None:
            self._target_since = None
            return decision
        return self._is_stable(trigger, decision, now)

    def moved(self, now: float) -> None:
        """This node has begun a move."""
        self._moved_at = (*self._moved_at, now)

    def _trigger(self, snapshot: Snapshot, now: float) -> tuple[_Trigger | None, str]:
        """Update the timers -> (the trigger that is active, if any; the state of the swarm, for people)."""
        policy = self._policy
        nodes = {n.peer: n for n in snapshot.nodes if not n.departing}
        spans = {peer: n.span for peer, n in nodes.items() if n.span is not None}
        held = coverage(spans.values(), snapshot.num_layers)
        self._uncovered_since = {
            layer: self._uncovered_since.get(layer, now) for layer, count in enumerate(held) if not count
        }
        spans |= place_joiners(snapshot)  # nodes that join now fill gaps without a move
        verdict = judge_spans(nodes, spans, snapshot.num_layers, policy.alpha, policy.threshold)
        verdict = min(verdict, self._without_doubted(spans), key=lambda one: one.cv) if not verdict.gap else verdict
        if verdict.cv <= policy.threshold:
            self._uneven_since = None
        elif self._uneven_since is None:
            self._uneven_since = now
        if self._uncovered_since:
            since = min(self._uncovered_since.values())
            if not all(coverage(spans.values(), snapshot.num_layers)):
                announced = all(snapshot.coverage()[layer] for layer in self._uncovered_since)
                timeout_s = min(policy.coverage_timeout_s * 2 ** len(self._moved_at), policy.imbalance_timeout_s)
                timeout_s = policy.stability_s if announced else timeout_s
                return _Trigger(True, since, timeout_s, verdict.reason), verdict.reason
            reason = "coverage: only nodes that are joining would hold some layers"
            return _Trigger(True, since, policy.imbalance_timeout_s, reason), reason
        if self._uneven_since is not None:
            return _Trigger(False, self._uneven_since, policy.imbalance_timeout_s, verdict.reason), verdict.reason
        return None, verdict.reason

    def _without_doubted(self, spans: Mapping[PeerId, LayerSpan]) -> ImbalanceVerdict:
        """The imbalance of the nodes that are worth a move: without it, doubted ones are its only reason."""
        assert self._firm is not None  # `observe` has set it
        nodes = {n.peer: n for n in self._firm.nodes if not n.departing}
        firm = {peer: span for peer, span in spans.items() if peer in nodes}
        return judge_spans(nodes, firm, self._firm.num_layers, self._policy.alpha, self._policy.threshold)

    def _leaves_to_doubted(self, move: SpanMove, snapshot: Snapshot) -> bool:
        """Whether layers that the move gives up would be left to nodes that are doubted, and to nobody else."""
        assert self._firm is not None  # `observe` has set it
        left = [layer for layer in move.old or () if layer not in move.new]
        held, firmly = (
            coverage((n.span for n in seen.serving() if n.span and n.peer != self._me), snapshot.num_layers)
            for seen in (snapshot, self._firm)
        )
        return any(held[layer] and not firmly[layer] for layer in left)

    def _decide(self, trigger: _Trigger, snapshot: Snapshot, now: float) -> RebalanceDecision:
        mine = snapshot.node(self._me)
        if mine is None or mine.state is not NodeState.SERVING:
            return RebalanceDecision(None, "this node is not serving")
        if mine.pinned:
            return RebalanceDecision(None, "the layers of this node were chosen by hand")
        if now - trigger.since < trigger.timeout_s:
            return RebalanceDecision(None, f"{trigger.reason}; waiting to see whether it lasts")
        if not trigger.gap and self._moved_at:
            return RebalanceDecision(None, f"{trigger.reason}; this node has moved not long ago")
        recent = now - self._policy.coverage_timeout_s
        staying = [replace(n, pinned=True) if n.span and self._seen[n.peer] > recent else n for n in snapshot.nodes]
        decision = self._recompute_target(trigger, replace(snapshot, nodes=tuple(staying)))
        if decision.move is not None and not trigger.gap and self._leaves_to_doubted(decision.move, snapshot):
            return RebalanceDecision(None, f"{trigger.reason}; but its layers would be left to nodes that are too new")
        return decision

    def _is_stable(self, trigger: _Trigger, decision: RebalanceDecision, now: float) -> RebalanceDecision:
        """`decision`, once it has been the same for `stability_s`."""
        if self._target_since is None:
            self._target_since = now
        overdue = trigger.gap and now - trigger.since >= 2 * trigger.timeout_s
        if overdue or now - self._target_since >= self._policy.stability_s:
            return decision
        return RebalanceDecision(None, f"{decision.reason}; waiting until everybody sees it so")

    def _recompute_target(self, trigger: _Trigger, snapshot: Snapshot) -> RebalanceDecision:
        places = tuple((n.peer, n.state, n.span, n.pinned) for n in snapshot.nodes)
        if places != self._places:
            self._places, self._target = places, None
        if self._target is None:
            try:
                self._target = target_allocation(snapshot, self._policy.alpha, self._policy.threshold)
                self._target_snapshot = snapshot
            except Infeasible as error:
                return RebalanceDecision(None, f"{error}; nothing to gain by moving")
        target = self._target
        better = target.after.cv <= target.before.cv * (1.0 - self._policy.min_gain)
        if not trigger.gap and not better:
            gain = f"from {target.before.cv:.2f} to {target.after.cv:.2f}"
            return RebalanceDecision(None, f"{trigger.reason}; but the best allocation would only bring it {gain}")
        first = self._first_wave(target, snapshot)
        move = next((m for m in first if m.peer == self._me), None)
        if move is None or move.old is None:
            return RebalanceDecision(None, f"{trigger.reason}; it is for others to move")
        return RebalanceDecision(move, f"{trigger.reason}; layers {move.old} -> {move.new}", self._target_snapshot)

    def _first_wave(self, target: TargetAllocation, snapshot: Snapshot) -> tuple[SpanMove, ...]:
        """The moves to make now: of those that are safe together, the ones that fill a gap if any do.

        A wave that uncovers layers can only go all at once.
        """
        first = target.plan.waves[0] if target.plan.waves else ()
        if uncovered_without(snapshot, {m.peer for m in first}):
            return first
        return tuple(m for m in first if any(layer in m.new for layer in self._uncovered_since)) or first
