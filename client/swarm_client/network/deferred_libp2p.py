"""A client that is connected directly starts a libp2p host and joins the DHT when it needs them, and not before.

Importing hivemind, starting its daemon and joining the DHT take seconds; a question that nodes answer over direct
connections needs neither. Owns when they are started: for a peer that no direct connection leads to, for a swarm of
which nodes do not tell enough, and in the background for a client that stays. Until then this is a `TlsTransport` and a
directory that knows nobody.
"""

from __future__ import annotations

import asyncio
import importlib
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
from swarm.net.base.transport import Connection, Handler, OnUpgrade
from swarm.net.transports.tls import TlsTransport
from swarm.types import PeerId

if TYPE_CHECKING:
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.multi import MultiTransport

logger = logging.getLogger(__name__)

Start = Callable[[TlsTransport], Awaitable[tuple["MultiTransport", "DhtDirectory"]]]
"""Starts the host beside a transport that runs, which becomes the result's, and joins the DHT. Raises NetworkError."""


@dataclass(frozen=True, slots=True)
class DeferralPolicy:
    """What libp2p waits for. Times in seconds."""

    direct_head_start_s: float = 1.0  # for direct addresses of a peer: a slow link against a host that is not needed
    lacking_after_s: float = 1.2  # nodes have told what they know: `GossipPolicy.first_wait_s`, and a little
    stays_after_s: float = 10.0  # a client that is still there gets its records from the DHT as well
    retry_s: float = 30.0  # after a start that failed


class DeferredLibp2p:
    """See `transport.UpgradingTransport` and `transport.Directory`. Owns the transport and the host that it is given.

    `is_lacking`: whether layers are missing from what nodes have told; set it once records are read.
    """

    def __init__(self, tls: TlsTransport, start: Start, policy: DeferralPolicy = DeferralPolicy()) -> None:
        self.is_lacking: Callable[[], bool] = lambda: False
        self._tls = tls
        self._start = start
        self._policy = policy
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()
        self._read_once = False
        self._tasks = TaskSet("deferred libp2p")
        self._starting: asyncio.Task[NetworkError | None] | None = None
        self._retry_at = 0.0
        self._multi: MultiTransport | None = None
        self._directory: DhtDirectory | None = None
        self._on_upgrade: OnUpgrade | None = None

    @property
    def peer(self) -> PeerId:
        return self._tls.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

    @property
    def is_started(self) -> bool:
        """Whether there is a libp2p host."""
        return self._multi is not None

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> Connection:
        if self._multi is not None:
            return await self._multi.dial(peer, addresses)
        attempts: list[Callable[[], Awaitable[Connection]]] = [partial(self._dial_by_libp2p, peer, addresses)]
        if any(map(is_direct, addresses)):
            attempts.insert(0, partial(self._tls.dial, peer, tuple(addresses)))
        return await staggered_race(attempts, self._policy.direct_head_start_s, _abort)

    async def serve(self, handler: Handler) -> None:
        """A client accepts nobody."""

    def on_upgrade(self, callback: OnUpgrade) -> None:
        self._on_upgrade = callback
        if self._multi is not None:
            self._multi.on_upgrade(callback)

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        """A client has no record."""

    async def read(self, model: str) -> dict[PeerId, bytes]:
        """What the DHT knows; nobody, at once, while it is not needed. Raises NetworkError."""
        if self._directory is None and not await self._is_needed():
            return {}
        await self._started()
        assert self._directory is not None
        return await self._directory.read(model)

    async def rebootstrap(self, addresses: Sequence[str]) -> int:
        """See `DhtDirectory.rebootstrap`; nobody answers before it is there."""
        return await self._directory.rebootstrap(addresses) if self._directory is not None else 0

    async def close(self) -> None:
        await self._tasks.close()
        if self._directory is not None:
            await self._directory.close()
        await (self._tls if self._multi is None else self._multi).close()

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

    async def _started(self) -> MultiTransport:
        """Raises NetworkError."""
        error = await asyncio.shield(self._start_soon())
        if self._multi is None:
            raise error or PeerUnreachable("this transport is closed")
        return self._multi

    async def _try_to_start(self) -> NetworkError | None:
        """The error is returned: nobody may be waiting for it."""
        try:
            # The import takes a second, which must not block the loop.
            await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")
            self._multi, self._directory = await self._start(self._tls)
        except NetworkError as error:
            self._retry_at = self._clock() + self._policy.retry_s
            logger.info("direct connections alone, libp2p did not start: %s", error)
            return error
        if self._on_upgrade is not None:
            self._multi.on_upgrade(self._on_upgrade)
        return None

    async def _dial_by_libp2p(self, peer: PeerId, addresses: Sequence[str]) -> Connection:
        """Raises PeerUnreachable."""
        try:
            multi = await self._started()
        except PeerUnreachable:
            raise
        except NetworkError as error:
            raise PeerUnreachable(f"{peer} cannot be reached by libp2p: {error}") from None
        return await multi.dial(peer, addresses)


def _abort(connection: Connection) -> None:
    assert isinstance(connection, FramedStream)
    connection.abort()
