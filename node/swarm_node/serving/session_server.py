"""Serves sessions to whoever connects: judges every frame, admits sessions, and gives each a task.

Owns the table of sessions and their tasks. What a session's task does is `flow`'s; knows no tensors (the engine does)
and no records (the announcer does).

The pool's reader of a connection calls `on_frame`, which never waits; one task a session runs its steps in order and
sends what comes out, so a slow next hop holds back its own sessions only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import (
    ConnectionLost,
    NetworkError,
    NodeBusy,
    ProtocolError,
    ResourceError,
    SwarmError,
    WrongModel,
)
from swarm.messages import (
    AnyMessage,
    CloseSession,
    DropInFlight,
    KvBlocks,
    KvFetch,
    OpenSession,
    PathSwitch,
    Ping,
    Pong,
    ProgressQuery,
    Reroute,
    SessionFailed,
    Step,
)
from swarm.net.base.tasks import TaskSet
from swarm.types import LayerSpan, ModelId
from swarm_node.serving.activation_log import ActivationLog
from swarm_node.serving.executor import Executor
from swarm_node.serving.kv_transfer import ConnectionSource, KvTransfer
from swarm_node.serving.quotas import Quotas
from swarm_node.serving.reply_sender import ReplySender
from swarm_node.serving.served_spans import ServedSpan, ServedSpans, SpanEngineApi
from swarm_node.serving.session import HopSession, InboundStep, PeerChannel
from swarm_node.serving.session_runner import Counters, SessionRunner

logger = logging.getLogger(__name__)

DETACHED_TTL_S = 5.0  # that what was computed for a session waits for its heir


class SessionServer:
    """`async with Service(...)`; `begin(engine, executor)` when a span is loaded; `drain()` before the end."""

    def __init__(
        self, served: ModelId, pool: ConnectionSource, limits: Limits, on_load: Callable[[], None] = lambda: None
    ) -> None:
        self.counters = Counters()
        self._logs = ActivationLog(limits.activation_log_bytes)
        self.homes = ServedSpans(on_gone=self._logs.close)
        self._served = served
        self._limits = limits
        self._on_load = on_load
        self._quotas = Quotas(limits)
        self._violations = pool.violations
        self._sessions: dict[bytes, HopSession] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._keys = itertools.count()
        self._refusal: Callable[[], SwarmError] | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._scope = TaskSet("service")
        self._answers = ReplySender(self._scope, self._quotas, limits.dial_timeout_s)
        self._handover = KvTransfer(pool, limits, self._quotas, self._scope)
        self._flow = SessionRunner(
            pool, limits, self._logs, self.counters, self._answers.send_best_effort, self._handover
        )

    async def __aenter__(self) -> SessionServer:
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

    @property
    def logged_bytes(self) -> int:
        """What the logs for replay take."""
        return self._logs.size

    def begin(self, engine: SpanEngineApi, executor: Executor) -> ServedSpan:
        """Take sessions on this span from now on."""
        return self.homes.add(engine, executor)

    async def end(self, home: ServedSpan) -> None:
        """Forget a span once the last session has left it. What it ran on is the caller's to close."""
        home.open = False
        await home.empty.wait()
        self.homes.remove(home)

    def refuse(self, why: Callable[[], SwarmError] | None) -> None:
        """Take no new session, for the reason that `why` makes; None: take them again. Those that are open go on."""
        self._refusal = why

    def idle(self, home: ServedSpan | None = None) -> bool:
        """Whether no session is open (in `home`)."""
        return not (self._sessions if home is None else home.keys)

    async def wait_idle(self, home: ServedSpan | None, seconds: float) -> None:
        """Return when no session is left (in `home`), or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (self._empty if home is None else home.empty).wait()

    def evict(self, why: SwarmError, where: Callable[[LayerSpan], bool], home: ServedSpan | None = None) -> int:
        """End the sessions (of `home`) on layers for which `where` holds; their clients go on elsewhere. How many.

        What was computed for them is kept for `DETACHED_TTL_S`, or until their clients have no more use for it.
        """
        going = [s for s in self._sessions.values() if (home is None or s.key in home.keys) and where(s.span)]
        going = [session for session in going if not session.detached]
        for session in going:
            self._detach(session, why)
        return len(going)

    async def drain(self) -> None:
        """Take no new session and wait until the last one is closed."""
        self.refuse(lambda: NodeBusy("this node is leaving the swarm"))
        await self._empty.wait()

    # Frames ----------------------------------------------------------------------------------------------------------

    async def on_frame(self, connection: PeerChannel, message: AnyMessage, body: Buffer) -> None:
        """The pool's callback. Raises ProtocolError, which ends the connection, when a peer broke too many rules.

        It waits for nobody: one connection carries the sessions of many.
        """
        try:
            match message:
                case Step():
                    self._on_step(connection, message, body)
                case OpenSession():
                    self._on_open(connection, message)
                case DropInFlight():
                    session = self._owned(connection, message.session)
                    if session is not None:
                        self._prune(session, message)
                case Reroute():
                    self._on_reroute(connection, message)
                case ProgressQuery():
                    session = self._owned(connection, message.session)
                    if session is not None:
                        self._answers.send_best_effort(connection, session.progress())
                case CloseSession():
                    session = self._owned(connection, message.session)
                    if session is not None:
                        self._drop(session, message.retain_prefix)
                case SessionFailed():
                    self._on_failed(connection, message)
                case KvFetch():
                    self._on_fetch(connection, message)
                case KvBlocks():
                    self._handover.on_blocks(connection.peer, message, body)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} is not for a node to receive")
        except ProtocolError as error:
            self._protocol_violation(connection, message, error)

    async def on_lost(self, connection: PeerChannel, error: NetworkError) -> None:
        """The pool's callback: a client's sessions end with its connection; those whose next hop is gone wait."""
        for home in self.homes:
            home.forget_client(connection.peer)
        for session in list(self._sessions.values()):
            if session.client is connection:
                self._drop(session)
            elif session.next_hop is connection:
                lost = ConnectionLost(f"lost the next hop {connection.peer}: {error}")
                self._flow.report_next_hop_lost(session, lost)

    def _on_fetch(self, connection: PeerChannel, message: KvFetch) -> None:
        """Raises ProtocolError."""
        session = self._sessions.get(message.session)
        home = self.homes.of(session.key) if session is not None and session.detached else None
        if session is None or home is None:
            self._answers.send_best_effort(connection, _unknown(message))
            return
        self._handover.serve(connection, session, home, message)

    def _on_failed(self, connection: PeerChannel, message: SessionFailed) -> None:
        self._handover.on_failed(connection.peer, message)
        session = self._sessions.get(message.session)
        if session is not None and session.next_hop is connection:
            lost = ConnectionLost(f"the next hop {connection.peer} gave up: {message.detail}")
            self._flow.report_next_hop_lost(session, lost)

    def _protocol_violation(self, connection: PeerChannel, message: AnyMessage, error: ProtocolError) -> None:
        """Record it and say so. Raises ProtocolError at the limit, upon which the pool cuts the peer off."""
        self.counters.protocol_errors += 1
        logger.warning("%s broke the protocol: %s", connection.peer, error)
        if self._violations.record(connection.peer, error):
            raise error
        if not isinstance(message, PathSwitch | Ping | Pong):
            self._answers.send_best_effort(connection, _failed(message.session, error, _epoch(message)))

    def _owned(self, connection: PeerChannel, session_id: bytes) -> HopSession | None:
        """The session if the sender is its client; None when it is gone already."""
        session = self._sessions.get(session_id)
        if session is not None and session.client.peer != connection.peer:
            raise ProtocolError("only its client may close, prune or reroute a session")
        return session

    def _on_step(self, connection: PeerChannel, step: Step, body: Buffer) -> None:
        session = self._sessions.get(step.session)
        if session is None:
            # No violation: steps in flight when a session ends are nobody's fault.
            self._answers.send_best_effort(connection, _unknown(step))
            return
        if session.detached:
            return  # its client knows
        try:
            session.arrive(connection.peer, InboundStep(step, body))
        except ProtocolError as error:
            if session.allows(connection.peer):
                self._give_up(session, error)
            raise
        except NodeBusy as error:
            self._give_up(session, error)

    def _prune(self, session: HopSession, message: DropInFlight) -> None:
        session.prune(message)
        home = self.homes.of(session.key)
        if home is not None:
            home.engine.prune(session.key, message.slots)

    def _on_reroute(self, connection: PeerChannel, message: Reroute) -> None:
        session = self._owned(connection, message.session)
        if session is None or session.detached:
            self._answers.send_best_effort(connection, _unknown(message))
            return
        try:
            session.redirect(message)
        except ProtocolError as error:
            self._give_up(session, error)
            raise
        except NodeBusy as error:
            self._give_up(session, error)

    # Sessions --------------------------------------------------------------------------------------------------------

    def _on_open(self, connection: PeerChannel, message: OpenSession) -> None:
        previous = self._sessions.get(message.session)
        if previous is not None:
            if previous.client.peer != connection.peer:
                raise ProtocolError("this session belongs to another client")
            self._drop(previous)  # its client starts it afresh, along another chain
        try:
            home = self._find(message)
            session = self._admit(home, connection, message)
        except ProtocolError:
            raise
        except SwarmError as error:
            self.counters.refused += 1
            self._answers.send_best_effort(connection, _failed(message.session, error, _epoch(message)))
            return
        self._tasks[session.key] = self._scope.start(self._run(session, home), f"session {session.key}")

    def _find(self, message: OpenSession) -> ServedSpan:
        """Where this node can serve what is asked for. Raises SwarmError."""
        served = self._served
        if message.model != served.model:
            raise WrongModel(f"this node serves {served.model}, not {message.model}")
        if message.weight_hash != served.weight_hash:
            raise WrongModel(f"this node's weights of {served.model} hash to {served.weight_hash}")
        if message.dtype != served.dtype:
            raise WrongModel(f"this node computes in {served.dtype}, not in {message.dtype}")
        if self._refusal is not None:
            raise self._refusal()
        home = self.homes.find(message.start, message.end)
        if bool(message.downstream) == (message.end == home.engine.rows.num_layers):
            raise ProtocolError("a hop has a next one unless it holds the last layer")
        return home

    def _admit(self, home: ServedSpan, connection: PeerChannel, message: OpenSession) -> HopSession:
        """Reserve what a session needs and note it. Raises NodeBusy, OutOfMemory, ContextOverflow."""
        self._quotas.take_session(connection.peer)
        session = HopSession.of(message, connection, next(self._keys), home.engine.rows)
        try:
            parent = home.admit(session, message.block_hashes, self._quotas.retry_after_s)
        except SwarmError:
            self._quotas.give_session(connection.peer)
            raise
        if not session.tail and session.committed:
            self._logs.fork(parent, session.key, session.committed)
        elif not session.tail:
            self._logs.open(session.key)
        self._sessions[session.id] = session
        self._empty.clear()
        self.counters.sessions += 1
        self._on_load()
        return session

    async def _run(self, session: HopSession, home: ServedSpan) -> None:
        try:
            await self._flow.run(session, home)
        except TimeoutError:
            self._give_up(session, ConnectionLost("the session was idle for too long"))
        except SwarmError as error:
            self._give_up(session, error)
        finally:
            # Whatever ended it, its pages are free; and were it a bug of ours, its client need not wait for nothing.
            if not session.detached:
                self._give_up(session, ResourceError("this node failed at the session"))

    def _detach(self, session: HopSession, why: SwarmError) -> None:
        """Do nothing more for a session; keep what there is until its client closes it, but not for long."""
        session.detached = True
        task = self._tasks.pop(session.key, None)
        if task is not None:
            task.cancel()
        self._note_failure(session, why)
        news = _failed(session.id, why, session.epoch)
        self._answers.send_best_effort(
            session.client, msgspec.structs.replace(news, kv_retained_tokens=session.committed)
        )
        self._scope.start(self._forget(session), f"parted session {session.key}")

    async def _forget(self, session: HopSession) -> None:
        await asyncio.sleep(DETACHED_TTL_S)
        self._drop(session)

    def _give_up(self, session: HopSession, error: SwarmError) -> None:
        """Drop a session that cannot go on and tell its client why."""
        if session.closed:
            return
        self._drop(session)
        self._note_failure(session, error)
        self._answers.send_best_effort(session.client, _failed(session.id, error, session.epoch))

    def _note_failure(self, session: HopSession, error: SwarmError) -> None:
        self.counters.failed += 1
        self.counters.last_errors = [*self.counters.last_errors[-9:], str(error)]
        logger.info("session %s ends: %s", session.id.hex(), error)

    def _drop(self, session: HopSession, prefix: Sequence[bytes] = ()) -> None:
        """Free what a session holds, but for what may be kept of `prefix`.

        Idempotent; its task ends at its next wait unless it is the one calling.
        """
        if session.closed:
            return
        session.closed = True
        del self._sessions[session.id]
        self._quotas.give_session(session.client.peer)
        home = self.homes.of(session.key)
        if home is not None:
            home.release(session.key, prefix)
        task = self._tasks.pop(session.key, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if not self._sessions:
            self._empty.set()
        self._on_load()


def _failed(session: bytes, error: SwarmError, epoch: int) -> SessionFailed:
    retry = error.retry_after_s if isinstance(error, NodeBusy) else 0.0
    return SessionFailed(session, error.code, str(error)[:1024], retry, epoch=epoch)


def _unknown(message: Step | Reroute | KvFetch) -> SessionFailed:
    sentence = "this node holds no such session"
    return SessionFailed(message.session, "unknown_session", sentence, epoch=_epoch(message))


def _epoch(message: AnyMessage) -> int:
    return message.epoch if isinstance(message, Step | OpenSession | Reroute | DropInFlight) else 0
