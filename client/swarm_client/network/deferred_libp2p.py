"""A client's transport and directory: direct connections at once, a libp2p host and the DHT when they are needed.

Importing hivemind, starting its daemon and joining the DHT take seconds; a question that nodes answer over direct
connections needs none of it. Owns when they are started: for a peer that no direct connection leads to, for a swarm of
which nodes do not tell enough, and in the background for a client that stays. Until then this is a `TlsTransport` and a
directory that knows nobody. Where there is no libp2p it remains so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from swarm.errors import NetworkError, PeerUnreachable
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.happy_eyeballs import staggered_race
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import is_direct
from swarm.net.base.transport import Handler, OnUpgrade
from swarm.net.transports.tls import TlsTransport
from swarm.types import PeerId

if TYPE_CHECKING:
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.libp2p_streams import Libp2pTransport
    from swarm.net.transports.multi import MultiTransport

logger = logging.getLogger(__name__)

StartLibp2p = Callable[[], Awaitable[tuple["Libp2pTransport", "DhtDirectory"]]]
"""Starts a host under this client's identity and joins the DHT. Raises NetworkError, and leaves nothing then."""


@dataclass(frozen=True, slots=True)
class DeferralPolicy:
    """What libp2p waits for. Times in seconds."""

    direct_head_start_s: float = 1.0  # for direct addresses of a peer: a slow link against a host that is not needed
    lacking_after_s: float = 1.2  # nodes have told what they know: `GossipPolicy.first_wait_s`, and a little
    stays_after_s: float = 10.0  # a client that is still there reads the DHT too: one source less that could lie
    retry_s: float = 30.0  # after a start that failed


class DeferredLibp2p:
    """See `transport.UpgradingTransport` and `transport.Directory`. Owns `direct`, and what `start` starts.

    `direct`: None where everything goes by libp2p. `start`: None where there is no libp2p. One of them is there.
    `is_lacking`: whether layers are missing from what nodes have told; set it once records are read.
    """

    def __init__(
        self,
        peer: PeerId,
        direct: TlsTransport | None,
        start: StartLibp2p | None,
        policy: DeferralPolicy = DeferralPolicy(),
    ) -> None:
        self.peer = peer
        self.is_lacking: Callable[[], bool] = lambda: False
        self._direct = direct
        self._start = start
        self._policy = policy
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()
        self._read_once = False
        self._tasks = TaskSet("deferred libp2p")
        self._starting: asyncio.Task[NetworkError | None] | None = None
        self._retry_at = 0.0
        self._running: tuple[MultiTransport, DhtDirectory] | None = None
        self._on_upgrade: OnUpgrade | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

    @property
    def is_started(self) -> bool:
        """Whether there is a libp2p host."""
        return self._running is not None

    async def started(self) -> tuple[MultiTransport, DhtDirectory]:
        """With a libp2p host, which has joined the DHT. Raises NetworkError."""
        if self._running is None:
            error = await asyncio.shield(self._start_soon())
            if self._running is None:
                raise error or PeerUnreachable("libp2p is not there")
        return self._running

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> FramedStream:
        if self._running is not None:
            return await self._running[0].dial(peer, addresses)
        attempts: list[Callable[[], Awaitable[FramedStream]]] = []
        if self._direct is not None and (self._start is None or any(map(is_direct, addresses))):
            attempts.append(partial(self._direct.dial, peer, addresses))
        if self._start is not None:
            attempts.append(partial(self._dial_by_libp2p, peer, addresses))
        return await staggered_race(attempts, self._policy.direct_head_start_s, FramedStream.abort)

    async def serve(self, handler: Handler) -> None:
        """A client accepts nobody."""

    def on_upgrade(self, callback: OnUpgrade) -> None:
        self._on_upgrade = callback

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        """A client has no record."""

    async def read(self, model: str) -> dict[PeerId, bytes]:
        """What the DHT knows; nobody, while it is not needed. Raises NetworkError."""
        if self._start is None or (self._running is None and not await self._is_needed()):
            return {}
        _, directory = await self.started()
        return await directory.read(model)

    async def rebootstrap(self, addresses: Sequence[str]) -> int:
        """See `DhtDirectory.rebootstrap`; nobody answers before it is there."""
        return await self._running[1].rebootstrap(addresses) if self._running is not None else 0

    async def close(self) -> None:
        await self._tasks.close()
        try:
            if self._running is not None:
                await self._running[1].close()
        finally:
            if self._running is not None:
                await self._running[0].close()
            elif self._direct is not None:
                await self._direct.close()

    async def _is_needed(self) -> bool:
        """Of the DHT, for a read that is to wait for it."""
        if not self._read_once:
            self._read_once = True
            await asyncio.sleep(self._policy.lacking_after_s)
        if self.is_lacking():
            return True
        if self._clock() - self._begun > self._policy.stays_after_s:
            self._start_soon()
        return False

    def _start_soon(self) -> asyncio.Task[NetworkError | None]:
        if self._starting is None or (self._starting.done() and not self.is_started and self._clock() > self._retry_at):
            self._starting = self._tasks.start(self._try_to_start(), "start")
        return self._starting

    async def _try_to_start(self) -> NetworkError | None:
        """The error is returned: nobody may be waiting for it."""
        if self._start is None:
            return None
        try:
            host, directory = await self._start()
        except NetworkError as error:
            self._retry_at = self._clock() + self._policy.retry_s
            logger.info("no libp2p: %s", error)
            return error
        from swarm.net.transports.multi import MultiTransport  # hivemind is there now

        reason = "" if self._direct is not None else "they are turned off"
        multi = MultiTransport(host, self._direct, reason)
        if self._on_upgrade is not None:
            multi.on_upgrade(self._on_upgrade)
        self._running = multi, directory
        return None

    async def _dial_by_libp2p(self, peer: PeerId, addresses: Sequence[str]) -> FramedStream:
        """Raises PeerUnreachable."""
        try:
            multi, _ = await self.started()
        except PeerUnreachable:
            raise
        except NetworkError as error:
            raise PeerUnreachable(f"{peer} cannot be reached by libp2p: {error}") from None
        return await multi.dial(peer, addresses)
