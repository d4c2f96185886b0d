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
from swarm.errors import ConnectionLost, NetworkError, NodeBusy, ProtocolError, ResourceError, SwarmError
from swarm.messages import (
    AnyMessage,
    CloseSession,
    DropInFlight,
    KvBlocks,
    KvFetch,
    OpenSession,
    OutsideSessions,
    ProgressQuery,
    Reroute,
    SessionFailed,
    Step,
)
from swarm.net.base.tasks import TaskSet
from swarm.receipts import WorkReceipt
from swarm.tap_messages import CarriedTaps, EndDrafts
from swarm.types import LayerSpan, ModelId, PeerId
from swarm_hop.auditing.audit_replies import AuditReplies, Sign
from swarm_hop.serving.activation_log import ActivationLog
from swarm_hop.serving.admission import AdmissionControl
from swarm_hop.serving.executor import Executor
from swarm_hop.serving.hop_dialer import AddressesOf, HopDialer, no_records
from swarm_hop.serving.kv_transfer import KvTransfer
from swarm_hop.serving.links import Links
from swarm_hop.serving.policy import SessionPolicy
from swarm_hop.serving.quotas import Quotas
from swarm_hop.serving.reply_sender import ReplySender, epoch_of, failure, unknown_session
from swarm_hop.serving.served_spans import ServedSpan, ServedSpans, SpanEngineApi
from swarm_hop.serving.session import HopSession, OfOwnSession, PeerChannel
from swarm_hop.serving.session_runner import Counters, SessionRunner
from swarm_hop.sharing.shares import SharePlaces

logger = logging.getLogger(__name__)


class SessionServer:
    """`async with SessionServer(...)`; `begin` when a span is loaded; `refuse` and `evict` to drain."""

    def __init__(
        self,
        served: ModelId,
        pool: Links,
        limits: Limits,
        on_load: Callable[[], None] = lambda: None,
        policy: SessionPolicy = SessionPolicy(),
        addresses_of: AddressesOf = no_records,
        places: SharePlaces | None = None,
        on_receipt: Callable[[HopSession, WorkReceipt], None] = lambda session, receipt: None,
        sign: Sign | None = None,
    ) -> None:
        """`on_load()` is called when the number of sessions changes. `addresses_of`: of the peers that clients name.
        `places`: whose account sessions go on. `on_receipt(session, receipt)`: its client's, not yet checked; raises
        ProtocolError. `sign`: with the node's key, for audits."""
        self.counters = Counters()
        self._logs = ActivationLog(limits.activation_log_bytes)
        self.audits = AuditReplies(self._logs, sign=sign)
        self.served_spans = ServedSpans(on_released=self._forget_rows)
        self.served = served
        self._policy = policy
        self._on_load = on_load
        self._on_receipt = on_receipt
        self._quotas = Quotas(limits, policy, _loop_time)
        self._violations = pool.violations
        self._sessions: dict[bytes, HopSession] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._keys = itertools.count()
        shares = places or SharePlaces(clock=_loop_time)
        self._admission = AdmissionControl(
            served, self.served_spans, self._quotas, shares, limits, self.live, self._fail, _loop_time
        )
        self._empty = asyncio.Event()
        self._empty.set()
        self._scope = TaskSet("service")
        self._replies = ReplySender(self._scope, self._quotas, limits.dial_timeout_s)
        self._unasked = pool.unasked
        dialer = HopDialer(pool, addresses_of, limits.next_hop_dial_timeout_s)
        self._kv_transfer = KvTransfer(dialer, limits, self._quotas, self._scope, policy)
        reply = self._replies.send_best_effort
        self._runner = SessionRunner(
            dialer, limits, self._logs, self.audits, self.counters, reply, self._kv_transfer, self._admission.make_room
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

    def uses(self, peer: PeerId) -> bool:
        """Whether a session that runs here needs the connections with `peer`."""
        return any(peer in (s.client.peer, s.upstream, s.downstream) for s in self._sessions.values())

    @property
    def logged_bytes(self) -> int:
        return self._logs.size

    def free_tokens(self, engine: SpanEngineApi, free: int) -> int:
        """Tokens that a new client could reserve, of which `free` are so now. See `reclaim.newcomer_tokens`."""
        found = next((served_span for served_span in self.served_spans if served_span.engine is engine), None)
        return free if found is None else self._admission.newcomer_tokens(found, free)

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
        self._admission.refusal = why

    @property
    def refusing(self) -> bool:
        """Whether `refuse` is in force."""
        return self._admission.refusal is not None

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
        evicted = [s for s in self.live() if (served_span is None or s.key in served_span.keys) and where(s.span)]
        for session in evicted:
            self._detach(session, why)
        return len(evicted)

    def live(self) -> list[HopSession]:
        return [session for session in self._sessions.values() if not session.detached]

    # Frames ----------------------------------------------------------------------------------------------------------

    async def on_frame(self, connection: PeerChannel, message: AnyMessage, body: Buffer) -> None:
        """The pool's callback. Raises ProtocolError, which ends the connection, at a peer's limit of violations.

        It never waits: one connection carries the sessions of many clients.
        """
        try:
            match message:
                case Step() | CarriedTaps():
                    self._on_step(connection, message, body)
                case OpenSession():
                    self._on_open(connection, message)
                case DropInFlight() | ProgressQuery() | AuditQuery() | CloseSession() | EndDrafts() | WorkReceipt():
                    session = self._owned(connection, message)
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
        if session is None or served_span is None or not session.allows_fetch(connection.peer, message.token):
            self._unasked(connection.peer, "a fetch of what it may not have")
            self._replies.send_best_effort(connection, unknown_session(message))
            return
        self._kv_transfer.serve(connection, session, served_span, message)

    def _on_owned(self, session: HopSession, message: OfOwnSession) -> None:
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
            case EndDrafts():
                session.end_drafts()
            case WorkReceipt():
                session.acknowledge()
                self._on_receipt(session, message)

    def _forget_rows(self, key: int) -> None:
        self._logs.close(key)
        self.audits.close(key)

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
        if not isinstance(message, OutsideSessions):
            self._replies.send_best_effort(connection, failure(message.session, error, epoch_of(message)))

    def _owned(self, connection: PeerChannel, message: OfOwnSession | Reroute) -> HopSession | None:
        """The session if the sender is its client; None when it is gone already."""
        session = self._sessions.get(message.session)
        if session is None and not isinstance(message, CloseSession):  # clients close what was refused, to be sure
            self._unasked(connection.peer, "a message for a session that is not here")
        elif session is not None and session.client.peer != connection.peer:
            raise ProtocolError("only its client may close, prune or reroute a session")
        return session

    def _on_step(self, connection: PeerChannel, step: Step | CarriedTaps, body: Buffer) -> None:
        session = self._sessions.get(step.session)
        if session is None:
            # No violation: steps may be in flight when a session ends, and a hop forwards what its client made it.
            self._replies.send_best_effort(connection, unknown_session(step))
            return
        if session.detached:
            return  # its client was notified
        session.active_s = _loop_time()
        try:
            session.accept(connection.peer, step, body)
        except ProtocolError as error:
            if session.allows(connection.peer):
                self._fail(session, error)
            raise
        except NodeBusy as error:
            self._fail(session, error)

    def _prune(self, session: HopSession, message: DropInFlight) -> None:
        session.prune(message)
        served_span = self.served_spans.of(session.key)
        if served_span is not None:
            served_span.engine.prune(session.key, message.slots)

    def _on_reroute(self, connection: PeerChannel, message: Reroute) -> None:
        session = self._owned(connection, message)
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
            session, served_span, parent = self._admission.admit(connection, message, next(self._keys))
        except ProtocolError:
            raise
        except SwarmError as error:
            self.counters.refused += 1
            self._replies.send_best_effort(connection, failure(message.session, error, epoch_of(message)))
            return
        self.audits.digests.fork(parent, session.key, session.committed)
        if not session.tail and session.committed:
            self._logs.fork(parent, session.key, session.committed)
        elif not session.tail:
            self._logs.open(session.key)
        self._sessions[session.id] = session
        self._empty.clear()
        self.counters.sessions += 1
        self._on_load()
        self._tasks[session.key] = self._scope.start(self._run(session, served_span), f"session {session.key}")

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
        left = msgspec.structs.replace(failure(session.id, why, session.epoch), kv_retained_tokens=session.committed)
        self._replies.send_best_effort(session.client, left)
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


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
