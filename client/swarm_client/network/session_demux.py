"""Sorts (demultiplexes) the frames of all connections into queues, one a session. Knows neither chains nor tokens."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from swarm.audit_messages import AuditReport
from swarm.codec import Buffer
from swarm.errors import NetworkError, ProtocolError
from swarm.messages import AnyMessage, ProgressReport, SessionFailed, SessionOpened, Step, StepResult
from swarm.net.pool.migratable_link import MigratableLink
from swarm.tap_messages import CarriedTaps, TailDraft, TapRows
from swarm.token_bucket import KeyedBuckets
from swarm.types import PeerId

OfASession = (
    SessionOpened | ProgressReport | SessionFailed | StepResult | TailDraft | TapRows | Step | CarriedTaps | AuditReport
)
"""What hops send to a client."""

MAX_UNREAD = 256  # frames waiting in one session's queue; its steps in flight are far fewer
CLOSED_SESSIONS = 256  # remembered, for what their hops had sent before they learned of the end
UNASKED_RATE, UNASKED_BURST = 10.0, 128.0  # frames of one peer for other sessions, a second and at once


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A frame for one session, or (without a message) the loss of the connection to `peer`."""

    peer: PeerId
    message: AnyMessage | None
    body: Buffer = b""
    error: NetworkError | None = None


class SessionDemux:
    """`on_frame` and `on_lost` are the pool's callbacks."""

    def __init__(self) -> None:
        self._queues: dict[bytes, asyncio.Queue[ReceivedMessage]] = {}
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self._unasked = KeyedBuckets(UNASKED_RATE, UNASKED_BURST)

    def __len__(self) -> int:
        """Sessions that are open."""
        return len(self._queues)

    def register(self, session: bytes) -> asyncio.Queue[ReceivedMessage]:
        return self._queues.setdefault(session, asyncio.Queue(MAX_UNREAD))

    def forget(self, session: bytes) -> None:
        if self._queues.pop(session, None) is not None:
            self._closed[session] = None
            if len(self._closed) > CLOSED_SESSIONS:
                self._closed.popitem(last=False)

    async def on_frame(self, connection: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        self.receive(connection.peer, message, body)

    def receive(self, peer: PeerId, message: AnyMessage, body: Buffer) -> None:
        """A frame of `peer`, which may be a hop in this process. Raises ProtocolError."""
        if not isinstance(message, OfASession):
            raise ProtocolError(f"a node sent a client a {type(message).__name__}")
        queue = self._queues.get(message.session)
        if queue is None:
            now = asyncio.get_running_loop().time()
            if message.session not in self._closed and not self._unasked.take(peer, 1.0, now):
                raise ProtocolError("a node keeps sending a client what it did not ask for")
            return
        if queue.full():
            raise ProtocolError(f"a node sent {MAX_UNREAD} unrequested frames")
        queue.put_nowait(ReceivedMessage(peer, message, body))

    async def on_lost(self, connection: MigratableLink, error: NetworkError) -> None:
        for queue in self._queues.values():
            while queue.full():
                queue.get_nowait()  # the loss matters more than what came before it
            queue.put_nowait(ReceivedMessage(connection.peer, None, error=error))
