"""The connections of one session to its hops, and which of the hops have failed.

Owns dialing, sending, closing, and the failure detector that runs while a reply is awaited. Knows neither the order of
the hops nor steps: a failure is raised as HopFailed, and the generation loop decides what follows from it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from swarm.codec import Buffer
from swarm.errors import ConnectionLost, NetworkError
from swarm.messages import MAX_BLOCK_HASHES, AnyMessage, CloseSession
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.receipts import WorkReceipt
from swarm.types import PeerId
from swarm_client.health.ping_failure_detector import PingFailureDetector
from swarm_client.health.watchdog import wait_with_watchdog

_T = TypeVar("_T")

CLOSE_TIMEOUT_S = 1.0  # a hop that does not read must not delay the end of a session


class HopFailed(NetworkError):
    """One hop of the chain cannot go on; `peer` is to be replaced, and `cause` is the reason."""

    code = "hop_failed"

    def __init__(self, peer: PeerId, cause: NetworkError) -> None:
        super().__init__(str(cause))
        self.peer = peer
        self.cause = cause


class HopLink(Protocol):
    """What a session sends on."""

    @property
    def peer(self) -> PeerId: ...

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """Raises NetworkError."""
        ...


@dataclass(slots=True)
class HopLinks:
    """`session`: the id that frames carry. `hops`: the peers of the chain in use, all of which are pinged.
    `local`: links to hops in this process, which need no dial.

    `failed`: the hops that have failed, and why, until a repair clears it.
    """

    session: bytes
    hops: Callable[[], Collection[PeerId]]
    ping_timeout_s: float
    _pool: ConnectionPool
    failed: dict[PeerId, NetworkError] = field(default_factory=dict)
    local: Mapping[PeerId, HopLink] = field(default_factory=dict)
    _connections: dict[PeerId, HopLink] = field(default_factory=dict)
    _failure_detector: PingFailureDetector = field(init=False)

    def __post_init__(self) -> None:
        self._failure_detector = PingFailureDetector(self._pool.rtt, self.ping_timeout_s)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers with a connection."""
        return tuple(self._connections)

    @property
    def reply_timeout_s(self) -> float:
        """How long a hop's reply to a query may take, which follows the measured round-trip times."""
        return self._failure_detector.next_timeout_s

    def mark_failed(self, peer: PeerId, cause: NetworkError) -> HopFailed:
        """Record the first cause of a hop's failure. -> the error to raise."""
        self.failed.setdefault(peer, cause)
        return HopFailed(peer, cause)

    async def dial(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Raises HopFailed."""
        try:
            self._connections[peer] = self.local.get(peer) or await self._pool.get(peer, addresses, timeout_s)
        except NetworkError as error:
            raise self.mark_failed(peer, error) from error

    async def send(self, peer: PeerId, message: AnyMessage, body: Buffer = b"") -> None:
        """Raises HopFailed."""
        try:
            await self._connections[peer].send(message, body)
        except NetworkError as error:
            raise self.mark_failed(peer, error) from error

    async def send_watched(self, peer: PeerId, message: AnyMessage) -> None:
        """`send`, pinging all hops while the connection does not take the frame. Raises HopFailed."""
        await self.await_with_pings(self.send(peer, message))

    async def broadcast(self, message: AnyMessage) -> None:
        """To every connected peer, best effort."""
        for connection in self._connections.values():
            with contextlib.suppress(NetworkError):
                await connection.send(message)

    async def close(
        self,
        peers: Collection[PeerId],
        retain_prefix: Mapping[PeerId, Sequence[bytes]] = {},
        receipts: Mapping[PeerId, WorkReceipt] = {},
    ) -> None:
        """End the session at `peers`, best effort. `retain_prefix`: for those that may cache the text's KV, its
        block hashes. `receipts`: for those that have worked for it."""
        leaving = [self._connections.pop(peer) for peer in peers if peer in self._connections]
        messages = {
            peer: CloseSession(self.session, list(retain_prefix.get(peer, ())[:MAX_BLOCK_HASHES])) for peer in peers
        }
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(
                    *(_send_best_effort(link, receipts.get(link.peer), messages[link.peer]) for link in leaving)
                )

    async def await_with_pings(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`; whenever it has taken the ping timeout more, ping all hops.

        All of them, for the hop whose reply is awaited may be waiting for another. A node's event loop answers pings,
        so a node that is only busy answers. Raises HopFailed.
        """
        return await wait_with_watchdog(work, self.ping_timeout_s, self.probe)

    async def probe(self) -> None:
        """Ping all hops. Raises HopFailed for one that is unresponsive; `failed` has them all."""
        dialed = [peer for peer in self.hops() if peer not in self.local]
        unresponsive = await self._failure_detector.unresponsive(dialed)
        for peer in unresponsive:
            self.mark_failed(peer, ConnectionLost(f"node {peer} fell silent"))
        if unresponsive:
            raise HopFailed(unresponsive[0], self.failed[unresponsive[0]])


async def _send_best_effort(link: HopLink, *messages: AnyMessage | None) -> None:
    with contextlib.suppress(NetworkError):
        for message in messages:
            if message is not None:
                await link.send(message)
