"""One simulated node: a queue, one batch at a time, KV memory, and τ as it would publish it.

Owns what a node knows of itself. The rules of the queue and of τ are those of the real node
(`swarm_node.serving.scheduler`, `swarm_node.membership.profiler`), written again because the planner may not import it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.plan.sim.devices import LayerCost
from swarm.plan.sim.session import Session, Step
from swarm.types import Hop, LayerSpan, NodeProfile, NodeState

PATIENCE = 4  # batches that may pass over the oldest prefill
MEMORY = 0.9  # weight of what was measured before, in τ
CALM_MS = 10_000.0  # without work, τ falls back to the idle machine's within a few of these


@dataclass(slots=True)
class Held:
    """A session at a node: the layers it has there and the bytes set aside for its KV."""

    session: Session
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
    cost: LayerCost
    capacity: int  # layers
    batch_tokens: int
    batch_sessions: int
    most_sessions: int
    coordinate: tuple[float, ...] = ()
    link_ms: dict[str, float] = field(default_factory=dict)
    born: float = 0.0
    died: float | None = None
    state: NodeState = NodeState.JOINING
    span: LayerSpan | None = None
    kv_room: float = 0.0
    kv_used: float = 0.0
    held: dict[int, Held] = field(default_factory=dict)
    opening: deque[tuple[Session, Hop]] = field(default_factory=deque)  # sessions that queue for room here
    busy: bool = False
    usage: Usage = field(default_factory=Usage)
    _decode: deque[Step] = field(default_factory=deque)
    _prefill: deque[Step] = field(default_factory=deque)
    _passed_over: int = 0
    _tau: float = 0.0
    _tau_at: float = 0.0
    _last: tuple[object, NodeProfile] | None = None  # what it published last, and what that depends on

    @property
    def alive(self) -> bool:
        return self.died is None

    def serves(self, hop: Hop) -> bool:
        span = self.span
        serving = self.alive and self.state is NodeState.SERVING
        return serving and span is not None and span.start <= hop.start and hop.end <= span.end

    def take_layers(self, span: LayerSpan, state: NodeState) -> None:
        """Serve or load `span` from now on; what sessions held goes."""
        self.span, self.state = span, state
        self.kv_room = self.cost.kv_room(span.start, span.end)
        self.kv_used = 0.0
        self.held.clear()

    # Sessions --------------------------------------------------------------------------------------------------------

    def kv_size(self, session: Session, hop: Hop) -> float:
        return session.most_tokens * (hop.end - hop.start) * self.cost.model.kv_token_bytes

    def can_open(self, session: Session, hop: Hop) -> bool:
        own = self.held.get(session.number)
        free = self.kv_room - self.kv_used + (own.size if own else 0.0)
        return (len(self.held) < self.most_sessions or own is not None) and self.kv_size(session, hop) <= free

    def open(self, session: Session, hop: Hop) -> None:
        self.close(session)
        size = self.kv_size(session, hop)
        self.held[session.number] = Held(session, hop, size)
        self.kv_used += size
        self.usage.most_kv = max(self.usage.most_kv, self.kv_used)

    def close(self, session: Session) -> bool:
        """Whether the session was open here."""
        held = self.held.pop(session.number, None)
        if held is None:
            return False
        self.kv_used = self.kv_used - held.size if self.held else 0.0
        return True

    # Work ------------------------------------------------------------------------------------------------------------

    def push(self, step: Step) -> None:
        (self._prefill if step.prefill else self._decode).append(step)

    def take(self) -> list[Step]:
        """The next batch: decoding first, one span, up to the token budget; a starved prefill before everything."""
        for queue in (self._decode, self._prefill):
            while queue and queue[0].stale:
                queue.popleft()
        starved = bool(self._prefill) and self._passed_over >= PATIENCE
        order = (self._prefill, self._decode) if starved else (self._decode, self._prefill)
        batch: list[Step] = []
        left = self.batch_tokens
        for queue in order:
            left = self._fill(batch, queue, left)
        waits = bool(self._prefill) and not any(step.prefill for step in batch)
        self._passed_over = self._passed_over + 1 if waits else 0
        return batch

    def _fill(self, batch: list[Step], queue: deque[Step], left: int) -> int:
        kept: list[Step] = []
        while queue and len(batch) < self.batch_sessions:
            step = queue[0]
            if step.stale:
                queue.popleft()
            elif batch and (step.hop != batch[0].hop or _twice(step, batch)):
                kept.append(queue.popleft())
            elif not batch or step.rows <= left:
                batch.append(queue.popleft())
                left -= step.rows
            else:
                break
        queue.extendleft(reversed(kept))
        return left

    def batch_ms(self, batch: list[Step]) -> float:
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
        return ms

    def observe(self, batch: list[Step], queue_ms: float, compute_ms: float, now: float) -> None:
        """Count a batch that is done. `queue_ms`: how long its decoding steps waited on average."""
        hop = batch[0].hop
        self.usage.busy_ms += compute_ms
        self.usage.rows += sum(step.rows for step in batch)
        self.usage.batches += 1
        if any(not step.prefill for step in batch):
            measured = (queue_ms + compute_ms) / (hop.end - hop.start)
            self._tau = MEMORY * self._measured_tau(now) + (1 - MEMORY) * measured
            self._tau_at = now

    # What it publishes -----------------------------------------------------------------------------------------------

    def _measured_tau(self, now: float) -> float:
        idle = self.cost.curve.at(1)
        return idle + (self._tau - idle) * math.exp((self._tau_at - now) / CALM_MS) if self._tau else idle

    def tau(self, now: float, expected: bool) -> tuple[float, ...]:
        """τ of each layer of the span, ms.

        Measured: the recent average of wait and compute of decoding steps, as the real node publishes it. Expected:
        what the cost model says of a batch with one more session than are open here, so that a chain that is selected
        or released shows at once (Parallax §3.3). Prefill that waits is left out: it delays a session once, and τ is
        paid for every token.
        """
        span = self.span
        if span is None:
            return ()
        layers = len(span)
        if not expected:
            return (self._measured_tau(now),) * layers
        rows = len(self.held) + 1
        tokens = sum(h.session.most_tokens for h in self.held.values())
        batch = self.cost.device.step_overhead_ms + layers * self.cost.layer_ms(rows, tokens, tokens)
        ends = self.cost.head_ms(rows) if span.end == self.cost.model.layers else 0.0
        each = batch / layers
        return (*(each for _ in range(layers - 1)), each + ends)

    def profile(self, now: float, expected: bool) -> NodeProfile:
        """What others read of it."""
        span, layer_ms = self.span, self.tau(now, expected)
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
            cost=self.cost.curve,
            kv_capacity_tokens=int(self.kv_room / token) if span else 0,
            kv_free_tokens=0 if full or not span else int((self.kv_room - self.kv_used) / token),
            sessions=len(self.held),
            region=self.cost.device.region,
            coordinate=self.coordinate,
            link_ms=self.link_ms,
        )
        self._last = depends, profile
        return profile

    def waiting(self) -> Iterator[Session]:
        """Sessions that queue for room here and still want it."""
        return (session for session, _ in self.opening if session.live)


def _twice(step: Step, batch: list[Step]) -> bool:
    """Whether the batch has a chunk of this prompt already; chunks stay apart, so that stages overlap."""
    return step.prefill and any(other.session is step.session for other in batch)
