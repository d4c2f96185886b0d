"""How sessions get their chains and keep them: routing, opening, admission queues, replay after a repair.

Owns the queues. A client opens chains, waits and retries as the real one does
(`swarm_client.generation.generation_loop`): nodes that refuse are excluded from the next try, and allowed again once
no other chain is left.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from swarm.errors import Infeasible, NoRoute
from swarm.planner.routing.repair import Repair
from swarm.simulator.clock import Clock
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimPhase, SimSession, SimStep
from swarm.simulator.policy import ReplayPlan, ServingPolicy
from swarm.simulator.scenario import Scenario
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Hop, PeerId

TOKEN_BYTES = 4.0


class EngineApi(Protocol):
    """The part of the engine that is used here."""

    scenario: Scenario
    policy: ServingPolicy
    network: NetworkModel
    clock: Clock
    nodes: dict[PeerId, SimNode]

    def notify(self, kind: str, **facts: object) -> None: ...
    def observe(self) -> StaleSnapshot: ...
    def published(self) -> None: ...
    def advance(self, session: SimSession) -> None: ...
    def unpark(self, session: SimSession) -> None: ...
    def send(self, step: SimStep, source: str, size: float) -> None: ...
    def fail(self, session: SimSession, reason: str) -> None: ...


class SessionAdmission:
    """Chains for the sessions of `engine`."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._serving = engine.scenario.serving
        self._queues: dict[str, deque[SimSession]] = {}  # by admission queue: sessions that wait for a chain
        self._broken: list[SimSession] = []  # sessions that wait for a repair
        self._polling = False

    def connect(self, session: SimSession) -> None:
        """Open a chain; while there is none, wait in the queue."""
        session.phase = SimPhase.CONNECTING
        session.waiting_since = self._engine.clock.now
        if session.hops:
            if session.broken_since is None:
                session.broken_since = session.waiting_since
            session.waiting_since = session.broken_since
            if not self._attempt(session):
                self._broken.append(session)
                self._poll()
            return
        session.admission_queue = self._engine.policy.admission_queue(session)
        queue = self._queues.setdefault(session.admission_queue, deque())
        queue.append(session)
        if len(queue) == 1:
            self.wake()

    def wake(self) -> None:
        """Capacity was freed: the first sessions of all queues try again."""
        for queue in self._queues.values():
            while queue and (not queue[0].live or self._attempt(queue[0])):
                queue.popleft()
        self._poll()

    def _poll(self) -> None:
        """While sessions wait, retry for all of them every `route_retry_ms`."""
        if not self._polling and (self._broken or any(self._queues.values())):
            self._polling = True
            self._engine.clock.after(self._serving.route_retry_ms, self._retry_all)

    def _retry_all(self) -> None:
        self._polling = False
        waiting = [*self._broken, *(session for queue in self._queues.values() for session in queue)]
        for session in waiting:
            session.banned.clear()  # a node that was busy or gone may be back
        for session in waiting:
            if session.live and self._too_late(session):
                self._engine.fail(session, "no route")
        broken, self._broken = self._broken, []
        self._broken += [session for session in broken if session.live and not self._attempt(session)]
        self.wake()

    def _too_late(self, session: SimSession) -> bool:
        limit_ms = self._serving.repair_timeout_ms if session.repairs else self._serving.route_timeout_ms
        return session.waiting_since <= self._engine.clock.now - limit_ms

    def _attempt(self, session: SimSession) -> bool:
        """Try to open the best chain; True if the session need not wait in the queue any longer."""
        while True:
            try:
                plan = self._plan(session)
            except (NoRoute, Infeasible):
                return False
            fresh = [hop for hop in plan.repair.chain.hops if hop not in plan.repair.kept]
            gone = next((hop for hop in fresh if not self._engine.nodes[hop.peer].alive), None)
            if gone is not None:
                session.banned.add(gone.peer)
                session.dials += 1
                self._engine.clock.after(self._serving.dial_timeout_ms, lambda: self._again(session))
                return True
            refused = [hop for hop in fresh if not self._has_room(session, hop)]
            if not refused:
                self._open(session, plan, fresh)
                return True
            session.banned.update(hop.peer for hop in refused)
            session.dials += len(refused)

    def _plan(self, session: SimSession) -> ReplayPlan:
        view = self._engine.observe()
        if session.held:
            return self._engine.policy.repair(session, view)
        session.wrong_from = None  # it starts afresh
        return ReplayPlan(Repair(self._engine.policy.choose(session, view), (), ()))

    def _again(self, session: SimSession) -> None:
        if session.live and session.hops and self._too_late(session):
            self._engine.fail(session, "no route")
        elif session.live and not self._attempt(session):
            waiting = self._broken if session.hops else self._queues.setdefault(session.admission_queue, deque())
            waiting.append(session)
            self._poll()

    def _has_room(self, session: SimSession, hop: Hop) -> bool:
        node = self._engine.nodes[hop.peer]
        return node.serves(hop) and (self._engine.policy.queues_at_nodes or node.can_open(session, hop))

    def _open(self, session: SimSession, plan: ReplayPlan, fresh: list[Hop]) -> None:
        engine = self._engine
        kept = {hop.peer for hop in plan.repair.kept}
        for hop in session.hops:
            if hop.peer not in kept:
                engine.nodes[hop.peer].close(session)
        session.hops = list(plan.repair.chain.hops)
        session.phase = SimPhase.RUNNING
        session.ready = kept if session.held else {hop.peer for hop in session.hops}
        engine.notify("open", s=session.number, chain=[f"{h.peer}:{h.start}:{h.end}" for h in session.hops])
        if engine.policy.queues_at_nodes:
            self.enter_queue(session, session.hops[0])
            return
        for hop in fresh:
            engine.nodes[hop.peer].open(session, hop)
        engine.published()
        farthest = max((engine.network.latency(session.request.client, hop.peer) for hop in fresh), default=0.0)
        epoch = session.epoch
        engine.clock.after(2 * farthest, lambda: self._opened(session, epoch, plan))

    def _opened(self, session: SimSession, epoch: int, plan: ReplayPlan) -> None:
        if session.epoch != epoch or not session.live:
            return
        if session.held and plan.repair.rebuild:
            self._replay(session, plan)
        else:
            self._engine.advance(session)

    def lost(self, session: SimSession, peer: PeerId) -> None:
        """The client has found out that a hop is gone, or has given it up."""
        if not session.live or all(hop.peer != peer for hop in session.hops):
            return
        session.ready.discard(peer)
        session.banned.add(peer)
        if session.phase is not SimPhase.RUNNING:
            return  # it is connecting already
        session.epoch += 1
        session.repairs += 1
        session.parked.clear()
        self._engine.notify("lost", s=session.number, n=peer)
        if session.repairs > self._serving.most_repairs:
            self._engine.fail(session, "too many repairs")
        else:
            self.connect(session)

    # Queues at nodes -------------------------------------------------------------------------------------------------

    def enter_queue(self, session: SimSession, hop: Hop) -> None:
        """Queue for capacity at one node (policies that extend their chains as they go)."""
        node = self._engine.nodes[hop.peer]
        node.opening.append((session, hop))
        self.admit(node)

    def admit(self, node: SimNode) -> None:
        """Admit the first sessions of a node's queue, as far as there is capacity."""
        while node.opening:
            session, hop = node.opening[0]
            if session.live and not node.can_open(session, hop):
                return
            node.opening.popleft()
            if session.live:
                node.open(session, hop)
                if hop.start == 0:
                    self._engine.advance(session)
                else:
                    self._engine.unpark(session)

    # Replays ---------------------------------------------------------------------------------------------------------

    def _replay(self, session: SimSession, plan: ReplayPlan) -> None:
        """Replay the chain's tokens to each run of new hops, from the hop before it, which logs its outputs."""
        runs = _runs(session.hops, {hop.peer for hop in plan.repair.rebuild})
        session.replays = len(runs)
        chunk = self._serving.prefill_chunk
        for first, last in runs:
            before = session.hops[first - 1].peer if first and not plan.from_client else session.request.client
            for base in range(0, session.held, chunk):
                rows = min(chunk, session.held - base)
                step = SimStep(session, session.epoch, rows, base, base + rows == session.held, first, last)
                row_bytes = self._engine.scenario.model.row_bytes if first else TOKEN_BYTES
                self._engine.send(step, before, rows * row_bytes)

    def replayed(self, step: SimStep) -> None:
        """A run's last hop has acknowledged a chunk to the client."""
        session = step.session
        if step.stale or not step.sample:
            return
        session.replays -= 1
        if not session.replays:
            session.ready = {hop.peer for hop in session.hops}
            self._engine.notify("replayed", s=session.number, tokens=session.held)
            self._engine.advance(session)


def _runs(hops: list[Hop], replayed: set[str]) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbouring hops whose peers are in `replayed`."""
    runs: list[tuple[int, int]] = []
    for i, hop in enumerate(hops):
        if hop.peer not in replayed:
            continue
        if runs and runs[-1][1] == i - 1:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs
