"""Serves sessions to whoever connects: frames in, steps to the executor, outputs to the next hop or the client.

Owns the table of sessions and their tasks. Knows no tensors (the engine does) and no records (the announcer does).

The pool's reader of a connection calls `on_frame`, which judges a frame and never waits; one task a session opens its
route, runs its steps in order and sends what comes out, so a slow next hop holds back its own sessions only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import (
    ConnectionLost,
    NetworkError,
    NodeBusy,
    NoRoute,
    PeerUnreachable,
    ProtocolError,
    SwarmError,
    WrongModel,
)
from swarm.messages import AnyMessage, Close, Failed, Open, Opened, Ping, Pong, Prune, Result, Step
from swarm.net.tasks import TaskScope
from swarm.types import LayerSpan, PeerId
from swarm_node.executor import Engine, Executor, Outcome
from swarm_node.quotas import Quotas
from swarm_node.sessions import Arrival, Link, Rows, Session

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """The connections of this node, as `net.pool` keeps them."""

    async def get(self, peer: PeerId, addresses: Sequence[str] = ()) -> Link:
        """Raises PeerUnreachable."""
        ...


class ServedEngine(Engine, Protocol):
    """An engine together with what it serves and the pages of its sessions."""

    @property
    def span(self) -> LayerSpan: ...

    @property
    def rows(self) -> Rows: ...

    def admit(self, key: int, max_tokens: int) -> None:
        """Reserve pages. Raises OutOfMemory or ContextOverflow."""
        ...

    def release(self, key: int) -> None: ...

    def prune(self, key: int, slots: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Served:
    """The model this node belongs to, as its sessions must name it."""

    model: str
    weight_hash: str
    dtype: str


@dataclass(slots=True, eq=False)
class Counters:
    """What happened since the start, for `status` and the record."""

    sessions: int = 0
    steps: int = 0
    tokens: int = 0
    failed: int = 0
    refused: int = 0
    protocol_errors: int = 0
    last_errors: list[str] = field(default_factory=list)


class Service:
    """`async with Service(...)`; `begin(engine, executor)` when the span is loaded; `drain()` before the end."""

    def __init__(self, served: Served, pool: Pool, limits: Limits, on_load: Callable[[], None] = lambda: None) -> None:
        self.counters = Counters()
        self._served = served
        self._pool = pool
        self._limits = limits
        self._on_load = on_load
        self._quotas = Quotas(limits)
        self._sessions: dict[bytes, Session] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._keys = itertools.count()
        self._engine: ServedEngine | None = None
        self._executor: Executor | None = None
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._scope = TaskScope("service")

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in list(self._sessions.values()):
            self._drop(session)
        await self._scope.close()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def begin(self, engine: ServedEngine, executor: Executor) -> None:
        """Take sessions from now on."""
        self._engine, self._executor = engine, executor

    async def drain(self) -> None:
        """Take no new session and wait until the last one is closed."""
        self._draining = True
        await self._empty.wait()

    # Frames ----------------------------------------------------------------------------------------------------------

    async def on_frame(self, connection: Link, message: AnyMessage, body: Buffer) -> None:
        """The pool's callback. Raises ProtocolError, which ends the connection, when a peer broke too many rules.

        It waits for nobody: one connection carries the sessions of many.
        """
        try:
            match message:
                case Step():
                    self._on_step(connection, message, body)
                case Open():
                    self._on_open(connection, message)
                case Prune():
                    session = self._owned(connection, message.session)
                    if session is not None and self._engine is not None:
                        session.prune(message)
                        self._engine.prune(session.key, message.slots)
                case Close():
                    session = self._owned(connection, message.session)
                    if session is not None:
                        self._drop(session)
                case Failed():
                    self._on_failed(connection, message)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} is not for a node to receive")
        except ProtocolError as error:
            self._offence(connection, message, error)

    async def on_lost(self, connection: Link, error: NetworkError) -> None:
        """The pool's callback: a client's sessions end with its connection, and so do those whose next hop is gone."""
        for session in list(self._sessions.values()):
            if session.client is connection:
                self._drop(session)
            elif session.next_hop is connection:
                self._give_up(session, ConnectionLost(f"lost the next hop {connection.peer}: {error}"))

    def _on_failed(self, connection: Link, message: Failed) -> None:
        session = self._sessions.get(message.session)
        if session is not None and session.next_hop is connection:
            self._give_up(session, ConnectionLost(f"the next hop {connection.peer} gave up: {message.detail}"))

    def _offence(self, connection: Link, message: AnyMessage, error: ProtocolError) -> None:
        """Count a broken rule and say so. Raises ProtocolError past the limit."""
        self.counters.protocol_errors += 1
        logger.warning("%s broke the protocol: %s", connection.peer, error)
        if self._quotas.offence(connection.peer):
            raise error
        if not isinstance(message, Ping | Pong):
            self._tell(connection, _failed(message.session, error))

    def _owned(self, connection: Link, session_id: bytes) -> Session | None:
        """The session if the sender is its client; None when it is gone already."""
        session = self._sessions.get(session_id)
        if session is not None and session.client.peer != connection.peer:
            raise ProtocolError("only its client may close or prune a session")
        return session

    def _on_step(self, connection: Link, step: Step, body: Buffer) -> None:
        session = self._sessions.get(step.session)
        if session is None:
            # Not an offence: steps in flight when a session ends are nobody's fault.
            self._tell(connection, Failed(step.session, "unknown_session", "this node holds no such session"))
            return
        try:
            session.arrive(connection.peer, Arrival(step, body))
        except ProtocolError as error:
            if session.allows(connection.peer):
                self._give_up(session, error)
            raise
        except NodeBusy as error:
            self._give_up(session, error)

    # Sessions --------------------------------------------------------------------------------------------------------

    def _on_open(self, connection: Link, message: Open) -> None:
        previous = self._sessions.get(message.session)
        if previous is not None:
            if previous.client.peer != connection.peer:
                raise ProtocolError("this session belongs to another client")
            self._drop(previous)  # its client starts it afresh, along another chain
        try:
            session = self._admit(connection, message)
        except ProtocolError:
            raise
        except SwarmError as error:
            self.counters.refused += 1
            self._tell(connection, _failed(message.session, error))
            return
        self._tasks[session.key] = self._scope.start(self._run(session), f"session {session.key}")

    def _admit(self, connection: Link, message: Open) -> Session:
        """Check that this node can and may serve the session, and reserve what it needs. Raises SwarmError."""
        engine, served = self._engine, self._served
        if message.model != served.model:
            raise WrongModel(f"this node serves {served.model}, not {message.model}")
        if message.weight_hash != served.weight_hash:
            raise WrongModel(f"this node's weights of {served.model} hash to {served.weight_hash}")
        if message.dtype != served.dtype:
            raise WrongModel(f"this node computes in {served.dtype}, not in {message.dtype}")
        if engine is None:
            raise NodeBusy("this node is still loading its layers")
        if self._draining:
            raise NodeBusy("this node is leaving the swarm")
        if not engine.span.start <= message.start < message.end <= engine.span.end:
            raise NoRoute(f"this node serves layers {engine.span}, not {message.start}:{message.end}")
        if bool(message.downstream) == (message.end == engine.rows.num_layers):
            raise ProtocolError("a hop has a next one unless it holds the last layer")
        self._quotas.take_session(connection.peer)
        session = Session.of(message, connection, next(self._keys), engine.rows)
        try:
            engine.admit(session.key, session.max_tokens)
        except SwarmError:
            self._quotas.give_session(connection.peer)
            raise
        self._sessions[session.id] = session
        self._empty.clear()
        self.counters.sessions += 1
        self._on_load()
        return session

    async def _run(self, session: Session) -> None:
        """A session's life after it was admitted."""
        try:
            await self._connect(session)
            while True:
                async with asyncio.timeout(self._limits.session_idle_s):
                    arrival = await session.next()
                session.admit(arrival.step)
                assert self._executor is not None  # sessions are admitted only after `begin`
                outcome = await self._executor.run(session, arrival)
                async with asyncio.timeout(self._limits.step_timeout_s):
                    await self._deliver(session, arrival.step, outcome)
        except TimeoutError:
            self._give_up(session, ConnectionLost("the session was idle, or its next hop did not read, for too long"))
        except SwarmError as error:
            self._give_up(session, error)
        finally:
            self._drop(session)  # whatever ended it, its pages are free

    async def _connect(self, session: Session) -> None:
        """Reach the next hop, or leave that edge to the client, and say which."""
        if session.downstream:
            try:
                session.next_hop = await self._pool.get(session.downstream, session.downstream_addresses)
            except PeerUnreachable as error:
                logger.info("the client relays for session %s: %s", session.id.hex(), error)
                session.next_hop = session.client
        await session.client.send(Opened(session.id, relay=session.next_hop is session.client))

    async def _deliver(self, session: Session, step: Step, outcome: Outcome) -> None:
        self.counters.steps += 1
        trace = [*step.trace, (outcome.queue_ms, outcome.compute_ms)]
        output = outcome.output
        if session.next_hop is None:
            self.counters.tokens += len(output.tokens)
            for token in output.tokens:
                session.drew(token, session.committed)
            result = Result(step.session, step.epoch, step.step, list(output.tokens), trace=trace)
            await session.client.send(result)
            return
        onward = Step(
            session=step.session,
            epoch=step.epoch,
            step=step.step,
            base=step.base,
            line=step.line,
            sample=step.sample,
            parents=step.parents,
            slots=step.slots,
            commit=step.commit,
            trace=trace,
        )
        await session.next_hop.send(onward, output.body)

    def _give_up(self, session: Session, error: SwarmError) -> None:
        """Drop a session that cannot go on and tell its client why."""
        if session.closed:
            return
        self._drop(session)
        self.counters.failed += 1
        self.counters.last_errors = [*self.counters.last_errors[-9:], str(error)]
        logger.info("session %s ends: %s", session.id.hex(), error)
        self._tell(session.client, _failed(session.id, error))

    def _drop(self, session: Session) -> None:
        """Free what a session holds. Idempotent; its task ends at its next wait unless it is the one calling."""
        if session.closed:
            return
        session.closed = True
        del self._sessions[session.id]
        self._quotas.give_session(session.client.peer)
        if self._engine is not None:
            self._engine.release(session.key)
        task = self._tasks.pop(session.key, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if not self._sessions:
            self._empty.set()
        self._on_load()

    def _tell(self, peer: Link, message: Failed) -> None:
        """Best effort and in a task of its own: a peer that does not read must hold up nobody else."""
        if self._quotas.take_answer(peer.peer):
            self._scope.start(self._send_answer(peer, message), f"answer to {peer.peer}")

    async def _send_answer(self, peer: Link, message: Failed) -> None:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                await peer.send(message)
        except (ConnectionLost, TimeoutError):
            logger.debug("%s does not listen to: %s", peer.peer, message.detail)
        finally:
            self._quotas.give_answer(peer.peer)


def _failed(session: bytes, error: SwarmError) -> Failed:
    retry = error.retry_after_s if isinstance(error, NodeBusy) else 0.0
    return Failed(session, error.code, str(error)[:1024], retry)
