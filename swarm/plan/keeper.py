"""A node's slow loop as events in, actions out: when this node should change its layers for the swarm's sake.

Owns patience: how long a trigger must last, how much a move must gain, how long to rest after one, so that the swarm
does not thrash. What triggers and where to go is `rebalance`'s; time comes with the events; moving is the node's.

Every node runs its own keeper. They agree without talking: the target is the same for all who read the same snapshot,
and only the moves of its first wave are safe to make now, so a node moves when its own move is in that wave.
The next wave follows from the next snapshots: whoever is still in the wrong place then finds itself in a first wave.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import Infeasible
from swarm.plan.membership import place_joiners
from swarm.plan.moves import Move
from swarm.plan.rebalance import ALPHA, THRESHOLD, Target, judge_spans, target
from swarm.types import LayerSpan, NodeState, PeerId, Snapshot, coverage, missing_ranges


@dataclass(frozen=True, slots=True)
class Policy:
    """`coverage_patience_s`, `patience_s`: how long layers must lack a node, or loads differ, with nobody moving.

    `rest_s`: after a move of its own a node makes no other for balance. `min_gain`: relative fall of the coefficient of
    variation for which moving is worth while.
    """

    alpha: float = ALPHA
    threshold: float = THRESHOLD
    coverage_patience_s: float = 6.0
    patience_s: float = 30.0
    rest_s: float = 300.0
    min_gain: float = 0.2


@dataclass(frozen=True, slots=True)
class Decision:
    """`move`: what this node should do now, None to stay. `reason`: why, for people."""

    move: Move | None
    reason: str


class Keeper:
    """One node's keeper; `observe` it with every snapshot of nodes that share its weights and dtype."""

    def __init__(self, me: PeerId, policy: Policy | None = None) -> None:
        self._me = me
        self._policy = Policy() if policy is None else policy
        self._places: tuple[tuple[PeerId, NodeState, LayerSpan | None], ...] = ()
        self._since: float | None = None  # when the swarm came to look as it looks now
        self._target: Target | None = None  # for these places; worked out when patience runs out
        self._rest_until = float("-inf")

    def observe(self, snapshot: Snapshot, now: float) -> Decision:
        """`now`: seconds of any clock that does not go back."""
        places = tuple((n.peer, n.state, n.span) for n in snapshot.nodes)
        if places != self._places or self._since is None:
            self._places, self._since, self._target = places, now, None
        return self._decide(snapshot, now, now - self._since)

    def moved(self, now: float) -> None:
        """This node has begun a move."""
        self._rest_until = now + self._policy.rest_s

    def _decide(self, snapshot: Snapshot, now: float, quiet_s: float) -> Decision:
        policy = self._policy
        mine = snapshot.node(self._me)
        if mine is None or mine.state is not NodeState.SERVING:
            return Decision(None, "this node is not serving")
        if mine.pinned:
            return Decision(None, "the layers of this node were chosen by hand")
        nodes = {n.peer: n for n in snapshot.nodes if n.state is not NodeState.DRAINING}
        spans = {peer: n.span for peer, n in nodes.items() if n.span is not None}
        spans |= place_joiners(snapshot)  # who joins now will fill what it can without anybody moving
        gap = bool(missing_ranges(coverage(spans.values(), snapshot.num_layers)))
        verdict = judge_spans(nodes, spans, snapshot.num_layers, policy.alpha, policy.threshold)
        patience_s = policy.coverage_patience_s if gap else policy.patience_s
        if not verdict.rebalance:
            return Decision(None, verdict.reason)
        if quiet_s < patience_s:
            return Decision(None, f"{verdict.reason}; waiting to see whether it lasts")
        if not gap and now < self._rest_until:
            return Decision(None, f"{verdict.reason}; this node has moved not long ago")
        return self._aim(snapshot, gap)

    def _aim(self, snapshot: Snapshot, gap: bool) -> Decision:
        if self._target is None:
            try:
                self._target = target(snapshot, self._policy.alpha, self._policy.threshold)
            except Infeasible as error:
                return Decision(None, f"{error}; nothing to gain by moving")
        aim = self._target
        better = aim.after.cv <= aim.before.cv * (1.0 - self._policy.min_gain)
        if not gap and not better:
            gain = f"from {aim.before.cv:.2f} to {aim.after.cv:.2f}"
            return Decision(None, f"{aim.before.reason}; but the best allocation would only bring it {gain}")
        first = aim.plan.waves[0] if aim.plan.waves else ()
        move = next((m for m in first if m.peer == self._me), None)
        if move is None or move.old is None:
            return Decision(None, f"{aim.before.reason}; it is for others to move")
        return Decision(move, f"{aim.before.reason}; layers {move.old} -> {move.new}")
