"""The discrete-event engine: requests arrive, steps travel from hop to hop, tokens come back.

Owns what happens to steps, and when; every decision is the policy's. How sessions get their chains is in
`session_admission`, what happens when nodes join and leave in `churn`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from swarm.planner.trust.evidence import FailureKind
from swarm.simulator.attacks import Attacks
from swarm.simulator.clock import Clock
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.rng import NamedStream
from swarm.simulator.model.session import SimPhase, SimSession, SimStep
from swarm.simulator.model.workload import SimRequest
from swarm.simulator.policy import ServingPolicy
from swarm.simulator.scenario import Scenario
from swarm.simulator.session_admission import TOKEN_BYTES, SessionAdmission
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import PeerId

Trace = Callable[[str], None]


class DiscreteEventEngine:
    """One run. `nodes` and `sessions` keep those that have ended too."""

    def __init__(
        self, scenario: Scenario, policy: ServingPolicy, network: NetworkModel, trace: Trace | None = None
    ) -> None:
        self.scenario = scenario
        self.policy = policy
        self.network = network
        self.clock = Clock()
        self.nodes: dict[PeerId, SimNode] = {}
        self.sessions: list[SimSession] = []
        self.open_requests = 0
        self.view = StaleSnapshot(scenario, network, self.nodes)
        self.chains = SessionAdmission(self)
        self.attacks = Attacks(self)
        self._next: dict[str, deque[SimRequest]] = {}  # of clients that make one request after the other
        self._trace = trace
        self._acceptance = NamedStream(scenario.seed, "acceptance")

    def notify(self, kind: str, **facts: object) -> None:
        """One line of the trace."""
        if self._trace is not None:
            line = {"t": round(self.clock.now, 6), "event": kind, **facts}
            self._trace(json.dumps(line, separators=(",", ":")))

    def observe(self) -> StaleSnapshot:
        self.view.now = self.clock.now
        return self.view

    def published(self) -> None:
        """Nodes have published new records."""
        self.view.version += 1

    # Requests --------------------------------------------------------------------------------------------------------

    def arrive(self, request: SimRequest) -> None:
        session = SimSession(len(self.sessions), request, request.prompt, request.output)
        self.sessions.append(session)
        self.open_requests += 1
        self.notify("arrive", s=session.number, prompt=session.prompt, output=session.output)
        self.chains.connect(session)

    def arrive_in_turn(self, requests: Iterable[SimRequest]) -> None:
        """Each client makes its next request when its last one has ended."""
        for request in requests:
            self._next.setdefault(request.client, deque()).append(request)
        for waiting in self._next.values():
            self.arrive(waiting.popleft())

    def advance(self, session: SimSession) -> None:
        """Send the next steps: the rest of the prompt, or the last token."""
        if session.held >= session.prompt:
            self._decode(session)
            return
        if not session.chunks:
            session.chunks = self.policy.chunks(session, self.observe())
        base = 0
        for rows in session.chunks:
            end = base + rows
            if end > session.held:
                start = max(base, session.held)
                step = SimStep(session, session.epoch, end - start, start, end == session.prompt)
                self.send(step, session.request.client, step.rows * TOKEN_BYTES)
            base = end

    def _decode(self, session: SimSession) -> None:
        rows = 1 + self.scenario.policy.draft_tokens
        step = SimStep(session, session.epoch, rows, session.held, True, sent_at=self.clock.now)
        self.send(step, session.request.client, step.rows * TOKEN_BYTES)

    # Steps -----------------------------------------------------------------------------------------------------------

    def send(self, step: SimStep, source: str, size: float) -> None:
        """`size` bytes from `source` to the step's hop."""
        arrival = self.network.send(source, step.hop.peer, size, self.clock.now)
        self.clock.at(arrival, lambda: self._reach(step))

    def _reach(self, step: SimStep) -> None:
        if step.stale:
            return
        node = self.nodes[step.hop.peer]
        step.reached_at = self.clock.now
        if node.alive and not self.attacks.swallows(step, node) and node.push(step):
            self._arrange_start(node)

    def _arrange_start(self, node: SimNode) -> None:
        """Start the node's next batch once its batch wait is over; without one, after the steps that arrive at this
        very moment, so that they share the batch."""
        now = self.clock.now
        if node.busy or node.start_at == now or not node.scheduler:
            return
        wait_ms = 1e3 * node.scheduler.wait_s()
        if node.start_at is None or not wait_ms:
            start_at = node.start_at = now + wait_ms
            self.clock.at(start_at, lambda: self._begin(node, start_at))

    def _begin(self, node: SimNode, start_at: float) -> None:
        if node.start_at != start_at:
            return
        node.start_at = None
        if not node.alive or not (batch := node.scheduler.take()):
            return
        node.busy = True
        compute_ms = node.batch_ms(batch)
        self.clock.after(compute_ms, lambda: self._done(node, batch, compute_ms))

    def _done(self, node: SimNode, batch: list[SimStep], compute_ms: float) -> None:
        node.busy = False
        if not node.alive:
            return
        node.ran(batch, compute_ms, self.clock.now)
        self.notify("batch", n=node.id, rows=sum(step.rows for step in batch), ms=round(compute_ms, 6))
        for step in batch:
            if not step.stale:
                self._pass_on(step)
        self._arrange_start(node)

    def _pass_on(self, step: SimStep) -> None:
        """A hop has finished a step."""
        session, here = step.session, step.hop
        now, client = self.clock.now, session.request.client
        self.attacks.ran(step, self.nodes[here.peer])
        if step.index == step.last:
            arrival = self.network.send(here.peer, client, 2 * TOKEN_BYTES, now)
            self.clock.at(arrival, lambda: self.chains.replayed(step))
        elif here.end == self.scenario.model.layers:
            arrival = self.network.send(here.peer, client, (1 + step.rows) * TOKEN_BYTES, now)
            self.clock.at(arrival, lambda: self._on_result(step))
        else:
            last = step.index + 1 == len(session.hops)
            if last:
                session.hops.append(self.policy.extend(session, self.observe()))
                session.ready.add(session.hops[-1].peer)
            following = step.advance()
            if session.number in self.nodes[following.peer].held or not self.policy.queues_at_nodes:
                self.send(step, here.peer, step.rows * self.scenario.model.row_bytes)
                return
            session.parked.append(step)
            if last:
                self.chains.enter_queue(session, following)

    def unpark(self, session: SimSession) -> None:
        """The hop that activations waited for has admitted the session."""
        waiting, session.parked = session.parked, []
        for step in waiting:
            self.send(step, session.hops[step.index - 1].peer, step.rows * self.scenario.model.row_bytes)

    def _on_result(self, step: SimStep) -> None:
        """The tail's result is back at the client."""
        session = step.session
        if step.stale:
            return
        session.steps += 1
        session.broken_since = None
        alone = step.rows == 1 and not step.prefill
        slow = self.policy.answered(session, step, self.clock.now - step.sent_at) if alone else None
        if step.prefill:
            session.held = step.base + step.rows
            if not step.sample:
                return
            tokens = 1
        else:
            tokens = 1 + self._accepted()
            session.held += tokens
        session.produced += tokens
        self.attacks.answered(session, tokens)
        if session.first_ms is None:
            session.first_ms = self.clock.now
        if session.produced >= session.output:
            if not self.attacks.holds_back(session):
                self.finish(session)
        elif self._outlined(session):
            self._fork(session)
        elif slow is not None:
            self.attacks.lose(session, slow, FailureKind.SLOW)
        else:
            self._decode(session)

    def _accepted(self) -> int:
        """How many draft tokens are accepted."""
        count = 0
        for chance in self.scenario.policy.acceptance[: self.scenario.policy.draft_tokens]:
            if self._acceptance.uniform() >= chance:
                break
            count += 1
        return count

    # Outlines (Jupiter) ----------------------------------------------------------------------------------------------

    def _outlined(self, session: SimSession) -> bool:
        spec = self.scenario.policy
        return session.parent is None and 0 < spec.outline_tokens <= session.produced

    def _fork(self, session: SimSession) -> None:
        """The points of an outline, all at once; they share the chain, the prefix and the KV room of the whole."""
        spec = self.scenario.policy
        left = session.output - session.produced
        points = min(spec.points, left)
        session.points_left = points
        for i in range(points):
            tokens = left // points + (i < left % points)
            point = SimSession(len(self.sessions), session.request, session.held + spec.point_prompt, tokens, session)
            point.hops, point.held, point.phase = session.hops, session.held, SimPhase.RUNNING
            point.chunks = (session.held, spec.point_prompt)
            self.sessions.append(point)
            self.advance(point)

    # Ends ------------------------------------------------------------------------------------------------------------

    def finish(self, session: SimSession) -> None:
        session.phase, session.done_ms = SimPhase.DONE, self.clock.now
        parent = session.parent
        if parent is not None:
            for hop in session.hops:
                self.nodes[hop.peer].close(session)
            parent.points_left -= 1
            parent.produced += session.produced
            if not parent.points_left:
                self.finish(parent)
            return
        self.notify("done", s=session.number, steps=session.steps)
        self._close(session)

    def fail(self, session: SimSession, reason: str) -> None:
        session.phase, session.done_ms, session.failure = SimPhase.FAILED, self.clock.now, reason
        self.notify("failed", s=session.number, reason=reason)
        self._close(session)

    def _close(self, session: SimSession) -> None:
        self.open_requests -= 1
        self.policy.closed(session)
        for hop in session.hops:
            node = self.nodes[hop.peer]
            if node.close(session):
                self.chains.admit(node)
        self.published()
        self.chains.wake()
        waiting = self._next.get(session.request.client)
        if waiting:
            request = msgspec.structs.replace(waiting.popleft(), at=self.clock.now)
            self.clock.after(0.0, lambda: self.arrive(request))
