"""Best-effort replies to peers that may not be reading: each in a task of its own, bounded per peer."""

from __future__ import annotations

import asyncio
import logging

from swarm.audit_messages import AuditReport
from swarm.codec import Buffer
from swarm.errors import ConnectionLost, NodeBusy, SwarmError
from swarm.messages import (
    AnyMessage,
    DropInFlight,
    KvFetch,
    OpenSession,
    ProgressReport,
    Reroute,
    SessionFailed,
    Step,
)
from swarm.net.base.tasks import TaskSet
from swarm.tap_messages import CarriedTaps
from swarm_hop.serving.quotas import Quotas
from swarm_hop.serving.session import PeerChannel

logger = logging.getLogger(__name__)

Reply = SessionFailed | ProgressReport | AuditReport


class ReplySender:
    """A peer that does not read loses its replies and delays no other."""

    def __init__(self, scope: TaskSet, quotas: Quotas, timeout_s: float) -> None:
        self._scope = scope
        self._quotas = quotas
        self._timeout_s = timeout_s

    def send_best_effort(self, peer: PeerChannel, message: Reply, body: Buffer = b"") -> None:
        if self._quotas.take_reply(peer.peer):
            self._scope.start(self._send(peer, message, body), f"reply to {peer.peer}")

    async def _send(self, peer: PeerChannel, message: Reply, body: Buffer) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await peer.send(message, body)
        except (ConnectionLost, TimeoutError):
            logger.debug("%s did not read: %s", peer.peer, message)
        finally:
            self._quotas.give_reply(peer.peer)


def failure(session: bytes, error: SwarmError, epoch: int) -> SessionFailed:
    retry = error.retry_after_s if isinstance(error, NodeBusy) else 0.0
    return SessionFailed(session, error.code, str(error)[:1024], retry, epoch=epoch)


def unknown_session(message: Step | CarriedTaps | Reroute | KvFetch) -> SessionFailed:
    sentence = "this node holds no such session"
    return SessionFailed(message.session, "unknown_session", sentence, epoch=epoch_of(message))


def epoch_of(message: AnyMessage) -> int:
    return message.epoch if isinstance(message, Step | OpenSession | Reroute | DropInFlight) else 0
