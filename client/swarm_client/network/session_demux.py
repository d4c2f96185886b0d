"""Sorts (demultiplexes) the frames of all connections into queues, one a session. Knows neither chains nor tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.audit_messages import AuditReport
from swarm.codec import Buffer
from swarm.errors import NetworkError, ProtocolError
from swarm.messages import AnyMessage, ProgressReport, SessionFailed, SessionOpened, Step, StepResult
from swarm.net.pool.migratable_link import MigratableLink
from swarm.types import PeerId

MAX_UNREAD = 256  # frames waiting in one session's queue; its steps in flight are far fewer


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

    def __len__(self) -> int:
        """Sessions that are open."""
        return len(self._queues)

    def register(self, session: bytes) -> asyncio.Queue[ReceivedMessage]:
        return self._queues.setdefault(session, asyncio.Queue(MAX_UNREAD))

    def forget(self, session: bytes) -> None:
        self._queues.pop(session, None)

    async def on_frame(self, connection: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        if not isinstance(message, SessionOpened | ProgressReport | SessionFailed | StepResult | Step | AuditReport):
            raise ProtocolError(f"a node sent a client a {type(message).__name__}")
        queue = self._queues.get(message.session)
        if queue is None:
            return  # a late message of a session that is closed
        if queue.full():
            raise ProtocolError(f"a node sent {MAX_UNREAD} unrequested frames")
        queue.put_nowait(ReceivedMessage(connection.peer, message, body))

    async def on_lost(self, connection: MigratableLink, error: NetworkError) -> None:
        for queue in self._queues.values():
            while queue.full():
                queue.get_nowait()  # the loss matters more than what came before it
            queue.put_nowait(ReceivedMessage(connection.peer, None, error=error))
