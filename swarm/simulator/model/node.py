"""One simulated node: its batches, KV memory, and τ as it publishes it.

Owns the state of a node. Which steps share a batch, how long a batch waits for more and what τ is follow the rules of
`planner.scheduling`, as at a real node; how long a batch takes is computed by `devices`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.planner.scheduling.batch_scheduler import BatchScheduler
from swarm.planner.scheduling.layer_time import BatchStats, LayerTimeEstimator
from swarm.planner.scheduling.session_order import SessionOrder
from swarm.planner.scheduling.work_model import WorkModel
from swarm.simulator.model.devices import DeviceCostModel
from swarm.simulator.model.hostile import Behaviour
from swarm.simulator.model.session import SimSession, SimStep
from swarm.types import CostCurve, Hop, LayerSpan, NodeProfile, NodeState


@dataclass(slots=True)
class QueuedStep:
    """A session at a node: the layers it has there and the bytes set aside for its KV."""

    session: SimSession
    hop: Hop
    size: float
    done_ms: float = 0.0  # of its work here


@dataclass(slots=True)
class Usage:
    """Since the start: ms of compute, rows and batches; the most bytes of KV ever held."""

    busy_ms: float = 0.0
    rows: int = 0
    batches: int = 0
    most_kv: float = 0.0


@dataclass(slots=True)
class SimNode:
    id: str
    cost: DeviceCostModel
    capacity: int  # layers
    batch_tokens: int
    batch_sessions: int | None  # steps of one batch; None: as many as fit
    most_sessions: int
    coordinate: tuple[float, ...] = ()
    link_ms: dict[str, float] = field(default_factory=dict)
    born: float = 0.0
    died: float | None = None
    behaviour: Behaviour = Behaviour.HONEST
    claim_factor: float = 1.0  # advertised over real time of a layer
    slow_factor: float = 1.0  # real time over what the machine could do
    addresses: tuple[str, ...] = ()
    state: NodeState = NodeState.JOINING
    span: LayerSpan | None = None
    kv_room: float = 0.0
    kv_used: float = 0.0
    held: dict[int, QueuedStep] = field(default_factory=dict)
    opening: deque[tuple[SimSession, Hop]] = field(default_factory=deque)  # sessions that queue for capacity here
    busy: bool = False
    start_at: float | None = None  # when the next batch is to be taken, ms
    usage: Usage = field(default_factory=Usage)
    scheduler: BatchScheduler[SimStep] = field(init=False)
    _order: SessionOrder[SimStep] = field(init=False)
    _layer_time: LayerTimeEstimator = field(init=False)
    _last: tuple[object, NodeProfile] | None = None  # what it published last, and what that was computed from

    def __post_init__(self) -> None:
        self._layer_time = LayerTimeEstimator(self.cost.curve)
        self.scheduler = BatchScheduler(
            self.batch_tokens, max_steps=self.batch_sessions, work=WorkModel(self.cost.curve)
        )
        self._order = SessionOrder()

    @property
    def alive(self) -> bool:
        return self.died is None

    def serves(self, hop: Hop) -> bool:
        span = self.span
        serving = self.alive and self.state is NodeState.SERVING
        return serving and span is not None and span.start <= hop.start and hop.end <= span.end

    def take_layers(self, span: LayerSpan, state: NodeState) -> None:
        """Serve or load `span` from now on; sessions are closed."""
        self.span, self.state = span, state
        self.kv_room = self.cost.kv_room(span.start, span.end)
        for held in list(self.held.values()):
            self.close(held.session)
        self.kv_used = 0.0

    # Sessions --------------------------------------------------------------------------------------------------------

    def kv_size(self, session: SimSession, hop: Hop) -> float:
        return session.most_tokens * (hop.end - hop.start) * self.cost.model.kv_token_bytes

    def can_open(self, session: SimSession, hop: Hop) -> bool:
        own = self.held.get(session.number)
        free = self.kv_room - self.kv_used + (own.size if own else 0.0)
        return (len(self.held) < self.most_sessions or own is not None) and self.kv_size(session, hop) <= free

    def open(self, session: SimSession, hop: Hop) -> None:
        self.close(session)
        size = self.kv_size(session, hop)
        self.held[session.number] = QueuedStep(session, hop, size)
        self.kv_used += size
        self.usage.most_kv = max(self.usage.most_kv, self.kv_used)

    def close(self, session: SimSession) -> bool:
        """Whether the session was open here."""
        self.scheduler.forget(session.number)
        self._order.forget(session.number)
        held = self.held.pop(session.number, None)
        if held is None:
            return False
        self.kv_used = self.kv_used - held.size if self.held else 0.0
        return True

    # Work ------------------------------------------------------------------------------------------------------------

    def push(self, step: SimStep) -> bool:
        """Whether the step is ready for a batch, and does not wait for another of its session."""
        ready = self._order.arrive(step)
        if ready is not None:
            self.scheduler.push(ready)
        return ready is not None

    def batch_ms(self, batch: list[SimStep]) -> float:
        rows = kv_tokens = sampled = 0
        context = 0.0
        for step in batch:
            rows += step.rows
            kv_tokens += step.base + step.rows
            context += step.rows * (step.base + step.rows / 2.0)
            sampled += step.sampled_rows
        hop, cost = batch[0].hop, self.cost
        ms = cost.device.step_overhead_ms + (hop.end - hop.start) * cost.layer_ms(rows, kv_tokens, context)
        if hop.end == cost.model.layers and sampled:
            ms += cost.head_ms(sampled)
        return ms * self.slow_factor

    def claimed_ms(self, step: SimStep) -> float:
        """What the step would take here by this node's record."""
        return self.claim_factor * len(step.span) * self.cost.curve.ms_at(step.rows)

    def ran(self, batch: list[SimStep], compute_ms: float, now: float) -> None:
        """Account for a finished batch, and queue the next steps of its sessions."""
        self.usage.busy_ms += compute_ms
        self.usage.batches += 1
        stats = BatchStats.of(batch, compute_ms)
        self.usage.rows += stats.rows
        self._layer_time.observe(stats, now / 1e3)
        self.scheduler.settle(batch, compute_ms)
        self.scheduler.completed((step for step in batch if step.session.live), compute_ms / 1e3, now / 1e3)
        for step in batch:
            following = self._order.ran(step)
            if following is not None:
                self.scheduler.push(following)

    # What it publishes -----------------------------------------------------------------------------------------------

    def profile(self, now: float) -> NodeProfile:
        """Its published record."""
        span = self.span
        if self.behaviour is Behaviour.HONEST:
            layer_ms = (self._layer_time.ms(len(self.held), now / 1e3),) * len(span) if span else ()
            cost, sessions = self.cost.curve, len(self.held)
        else:
            layer_ms = (self.claim_factor * self.cost.curve.ms_at(1),) * len(span) if span else ()
            cost = CostCurve(self.cost.curve.widths, tuple(self.claim_factor * ms for ms in self.cost.curve.ms))
            sessions = 0
        depends = (span, self.state, layer_ms, len(self.held), self.kv_used)
        if self._last is not None and self._last[0] == depends:
            return self._last[1]
        token = self.cost.model.kv_token_bytes * len(span) if span else 1.0
        full = len(self.held) >= self.most_sessions
        profile = NodeProfile(
            peer=self.id,
            name=self.id,
            state=self.state,
            dtype="",
            weight_hash="",
            layer_capacity=self.capacity,
            span=span,
            layer_ms=layer_ms,
            cost=cost,
            kv_capacity_tokens=int(self.kv_room / token) if span else 0,
            kv_free_tokens=0 if full or not span else int((self.kv_room - self.kv_used) / token),
            sessions=sessions,
            addresses=self.addresses,
            region=self.cost.device.region,
            network_coordinate=self.coordinate,
            link_ms=self.link_ms,
        )
        self._last = depends, profile
        return profile

    def waiting(self) -> Iterator[SimSession]:
        """Live sessions that queue for capacity here."""
        return (session for session, _ in self.opening if session.live)
