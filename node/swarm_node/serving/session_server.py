"""Serves sessions to the peers that connect: checks every frame, admits sessions, and starts a task for each.

Owns the table of sessions and their tasks. What a session's task does is in `session_runner`; tensors belong to the
engine and records to `membership`.

The connection pool calls `on_frame`, which never waits; one task per session runs its steps in order and sends the
outputs, so a slow next hop holds back its own sessions only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from swarm.audit_messages import AuditQuery
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
from swarm_node.serving.audit_replies import AuditReplies, Sign
from swarm_node.serving.executor import Executor
from swarm_node.serving.kv_transfer import ConnectionSource, KvTransfer
from swarm_node.serving.policy import SessionPolicy
from swarm_node.serving.quotas import Quotas
from swarm_node.serving.reply_sender import ReplySender, epoch_of, failure, unknown_session
from swarm_node.serving.served_spans import ServedSpan, ServedSpans, SpanEngineApi
from swarm_node.serving.session import HopSession, InboundStep, PeerChannel
from swarm_node.serving.session_runner import Counters, SessionRunner

logger = logging.getLogger(__name__)


class SessionServer:
    """`async with SessionServer(...)`; `begin` when a span is loaded; `refuse` and `evict` to drain."""

    def __init__(
        self,
        served: ModelId,
        pool: ConnectionSource,
        limits: Limits,
        on_load: Callable[[], None] = lambda: None,
        policy: SessionPolicy = SessionPolicy(),
        sign: Sign | None = None,
    ) -> None:
        """`on_load()` is called when the number of sessions changes. `sign`: with the node's key, for audits."""
        self.counters = Counters()
        self._logs = ActivationLog(limits.activation_log_bytes)
        self.audits = AuditReplies(self._logs, sign=sign)
        self.served_spans = ServedSpans(on_released=self._forget_rows)
        self.served = served
        self._policy = policy
        self._on_load = on_load
        self._quotas = Quotas(limits, policy)
        self._violations = pool.violations
        self._sessions: dict[bytes, HopSession] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._keys = itertools.count()
        self._refusal: Callable[[], SwarmError] | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._scope = TaskSet("service")
        self._replies = ReplySender(self._scope, self._quotas, limits.dial_timeout_s)
        self._kv_transfer = KvTransfer(pool, limits, self._quotas, self._scope, policy)
        self._runner = SessionRunner(
            pool, limits, self._logs, self.audits, self.counters, self._replies.send_best_effort, self._kv_transfer
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
        return self._logs.size

    def begin(self, engine: SpanEngineApi, executor: Executor) -> ServedSpan:
        """Admit sessions on this span from now on."""
        return self.served_spans.add(engine, executor)

    async def end(self, served_span: ServedSpan) -> None:
        """Remove a span once its last session has ended. The caller closes its executor."""
        served_span.open = False
        await served_span.empty.wait()
        self.served_spans.remove(served_span)

    def refuse(self, why: Callable[[], SwarmError] | None) -> None:
        """Refuse new sessions with the error that `why()` makes; None: take them again. Open sessions go on."""
        self._refusal = why

    @property
    def refusing(self) -> bool:
        """Whether `refuse` is in force."""
        return self._refusal is not None

    def idle(self, served_span: ServedSpan | None = None) -> bool:
        """Whether no session is open (in `served_span`)."""
        return not (self._sessions if served_span is None else served_span.keys)

    async def wait_idle(self, served_span: ServedSpan | None, seconds: float) -> None:
        """Return when no session is left (in `served_span`), or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (self._empty if served_span is None else served_span.empty).wait()

    def evict(self, why: SwarmError, where: Callable[[LayerSpan], bool], served_span: ServedSpan | None = None) -> int:
        """End the sessions (of `served_span`) on layers for which `where` holds; their clients fail over. -> how many.

        Their KV cache is kept for `SessionPolicy.detached_ttl_s`, or until their clients close them.
        """
        evicted = [
            s for s in self._sessions.values() if (served_span is None or s.key in served_span.keys) and where(s.span)
        ]
        evicted = [session for session in evicted if not session.detached]
        for session in evicted:
            self._detach(session, why)
        return len(evicted)

    # Frames ----------------------------------------------------------------------------------------------------------

    async def on_frame(self, connection: PeerChannel, message: AnyMessage, body: Buffer) -> None:
        """The pool's callback. Raises ProtocolError, which ends the connection, at a peer's limit of violations.

        It never waits: one connection carries the sessions of many clients.
        """
        try:
            match message:
                case Step():
                    self._on_step(connection, message, body)
                case OpenSession():
                    self._on_open(connection, message)
                case DropInFlight() | ProgressQuery() | AuditQuery() | CloseSession():
                    session = self._owned(connection, message.session)
                    if session is not None:
                        self._on_owned(session, message)
                case Reroute():
                    self._on_reroute(connection, message)
                case SessionFailed():
                    self._on_failed(connection, message)
                case KvFetch():
                    self._on_fetch(connection, message)
                case KvBlocks():
                    self._kv_transfer.on_blocks(connection.peer, message, body)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} is not for a node to receive")
        except ProtocolError as error:
            self._on_violation(connection, message, error)

    async def on_lost(self, connection: PeerChannel, error: NetworkError) -> None:
        """The pool's callback: a client's sessions end with its connection; those whose next hop is lost stall."""
        for served_span in self.served_spans:
            served_span.forget_client(connection.peer)
        for session in list(self._sessions.values()):
            if session.client is connection:
                self._drop(session)
            elif session.next_hop is connection:
                lost = ConnectionLost(f"lost the next hop {connection.peer}: {error}")
                self._runner.report_next_hop_lost(session, lost)

    def _on_fetch(self, connection: PeerChannel, message: KvFetch) -> None:
        """Raises ProtocolError."""
        session = self._sessions.get(message.session)
        served_span = self.served_spans.of(session.key) if session is not None and session.detached else None
        if session is None or served_span is None:
            self._replies.send_best_effort(connection, unknown_session(message))
            return
        self._kv_transfer.serve(connection, session, served_span, message)

    def _on_failed(self, connection: PeerChannel, message: SessionFailed) -> None:
        self._kv_transfer.on_failed(connection.peer, message)
        session = self._sessions.get(message.session)
        if session is not None and session.next_hop is connection:
            lost = ConnectionLost(f"the next hop {connection.peer} failed: {message.detail}")
            self._runner.report_next_hop_lost(session, lost)

    def _on_violation(self, connection: PeerChannel, message: AnyMessage, error: ProtocolError) -> None:
        """Record and report it. Raises ProtocolError at the limit; the pool then disconnects the peer."""
        self.counters.protocol_errors += 1
        logger.warning("%s broke the protocol: %s", connection.peer, error)
        if self._violations.record(connection.peer, error):
            raise error
        if not isinstance(message, PathSwitch | Ping | Pong):
            self._replies.send_best_effort(connection, failure(message.session, error, epoch_of(message)))

    def _owned(self, connection: PeerChannel, session_id: bytes) -> HopSession | None:
        """The session if the sender is its client; None when it is gone already."""
        session = self._sessions.get(session_id)
        if session is not None and session.client.peer != connection.peer:
            raise ProtocolError("only its client may close, prune or reroute a session")
        return session

    def _on_step(self, connection: PeerChannel, step: Step, body: Buffer) -> None:
        session = self._sessions.get(step.session)
        if session is None:
            # No violation: steps may be in flight when a session ends.
            self._replies.send_best_effort(connection, unknown_session(step))
            return
        if session.detached:
            return  # its client was notified
        try:
            session.arrive(connection.peer, InboundStep(step, body))
        except ProtocolError as error:
            if session.allows(connection.peer):
                self._fail(session, error)
            raise
        except NodeBusy as error:
            self._fail(session, error)

    def _on_owned(self, session: HopSession, message: DropInFlight | ProgressQuery | AuditQuery | CloseSession) -> None:
        """From the session's client. Raises ProtocolError."""
        match message:
            case DropInFlight():
                self._prune(session, message)
            case ProgressQuery():
                self._replies.send_best_effort(session.client, session.progress())
            case AuditQuery():
                self._replies.send_best_effort(session.client, *self.audits.report(session, message, self.served))
            case CloseSession():
                self._drop(session, message.retain_prefix)

    def _forget_rows(self, key: int) -> None:
        self._logs.close(key)
        self.audits.close(key)

    def _prune(self, session: HopSession, message: DropInFlight) -> None:
        session.prune(message)
        served_span = self.served_spans.of(session.key)
        if served_span is not None:
            served_span.engine.prune(session.key, message.slots)

    def _on_reroute(self, connection: PeerChannel, message: Reroute) -> None:
        session = self._owned(connection, message.session)
        if session is None or session.detached:
            self._replies.send_best_effort(connection, unknown_session(message))
            return
        try:
            session.redirect(message)
        except ProtocolError as error:
            self._fail(session, error)
            raise
        except NodeBusy as error:
            self._fail(session, error)

    # Sessions --------------------------------------------------------------------------------------------------------

    def _on_open(self, connection: PeerChannel, message: OpenSession) -> None:
        previous = self._sessions.get(message.session)
        if previous is not None:
            if previous.client.peer != connection.peer:
                raise ProtocolError("this session belongs to another client")
            self._drop(previous)  # its client reopens it along another chain
        try:
            served_span = self._find(message)
            session = self._admit(served_span, connection, message)
        except ProtocolError:
            raise
        except SwarmError as error:
            self.counters.refused += 1
            self._replies.send_best_effort(connection, failure(message.session, error, epoch_of(message)))
            return
        self._tasks[session.key] = self._scope.start(self._run(session, served_span), f"session {session.key}")

    def _find(self, message: OpenSession) -> ServedSpan:
        """The loaded span that can serve the request. Raises SwarmError."""
        served = self.served
        if message.model != served.model:
            raise WrongModel(f"this node serves {served.model}, not {message.model}")
        if message.weight_hash != served.weight_hash:
            raise WrongModel(f"this node's weights of {served.model} hash to {served.weight_hash}")
        if message.dtype != served.dtype:
            raise WrongModel(f"this node computes in {served.dtype}, not in {message.dtype}")
        if self._refusal is not None:
            raise self._refusal()
        served_span = self.served_spans.find(message.start, message.end)
        if bool(message.downstream) == (message.end == served_span.engine.rows.num_layers):
            raise ProtocolError("a hop has a next one unless it holds the last layer")
        return served_span

    def _admit(self, served_span: ServedSpan, connection: PeerChannel, message: OpenSession) -> HopSession:
        """Reserve what a session needs and register it. Raises SwarmError."""
        session = HopSession.of(message, connection, next(self._keys), served_span.engine.rows)
        self._quotas.take_session(connection.peer)
        try:
            parent = served_span.admit(session, message.block_hashes, self._quotas.retry_after_s)
        except SwarmError:
            self._quotas.give_session(connection.peer)
            raise
        self.audits.digests.fork(parent, session.key, session.committed)
        if not session.tail and session.committed:
            self._logs.fork(parent, session.key, session.committed)
        elif not session.tail:
            self._logs.open(session.key)
        self._sessions[session.id] = session
        self._empty.clear()
        self.counters.sessions += 1
        self._on_load()
        return session

    async def _run(self, session: HopSession, served_span: ServedSpan) -> None:
        try:
            await self._runner.run(session, served_span)
        except TimeoutError:
            self._fail(session, ConnectionLost("the session was idle for too long"))
        except SwarmError as error:
            self._fail(session, error)
        finally:
            # Whatever ended it, its blocks are freed; after a bug of ours its client learns of it too.
            if not session.detached:
                self._fail(session, ResourceError("this node failed to run the session"))

    def _detach(self, session: HopSession, why: SwarmError) -> None:
        """Stop a session's task and keep its KV cache for a transfer, until its client closes it or the TTL ends."""
        session.detached = True
        task = self._tasks.pop(session.key, None)
        if task is not None:
            task.cancel()
        self._record_failure(session, why)
        left = failure(session.id, why, session.epoch)
        self._replies.send_best_effort(
            session.client, msgspec.structs.replace(left, kv_retained_tokens=session.committed)
        )
        self._scope.start(self._forget(session), f"detached session {session.key}")

    async def _forget(self, session: HopSession) -> None:
        await asyncio.sleep(self._policy.detached_ttl_s)
        self._drop(session)

    def _fail(self, session: HopSession, error: SwarmError) -> None:
        """Drop a session that cannot go on and notify its client."""
        if session.closed:
            return
        self._drop(session)
        self._record_failure(session, error)
        self._replies.send_best_effort(session.client, failure(session.id, error, session.epoch))

    def _record_failure(self, session: HopSession, error: SwarmError) -> None:
        self.counters.failed += 1
        self.counters.last_errors = [*self.counters.last_errors[-9:], str(error)]
        logger.info("session %s ends: %s", session.id.hex(), error)

    def _drop(self, session: HopSession, prefix: Sequence[bytes] = ()) -> None:
        """Free what a session holds, except what is retained for the block hashes `prefix`.

        Idempotent; its task ends at its next wait unless it is the one calling.
        """
        if session.closed:
            return
        session.closed = True
        del self._sessions[session.id]
        self._quotas.give_session(session.client.peer)
        served_span = self.served_spans.of(session.key)
        if served_span is not None:
            served_span.release(session.key, prefix)
        task = self._tasks.pop(session.key, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if not self._sessions:
            self._empty.set()
        self._on_load()
