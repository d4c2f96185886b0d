"""The connections of one peer, shared by all its sessions.

Owns the set of connections: at most one outgoing connection a peer, dialled once for all concurrent callers; one reader
task for every connection, dialled or accepted; keepalive pings; refusing peers with too many protocol violations
(`violations`); migrating links to a better path (`migratable_link`) when the transport finds one. Knows no session and
no message but `Ping`, `Pong`, `PathSwitch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable, ProtocolError
from swarm.messages import AnyMessage, PathSwitch, Ping, Pong
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Connection, Transport, UpgradingTransport
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.pool.violations import ProtocolViolations
from swarm.types import PeerId

logger = logging.getLogger(__name__)

OnFrame = Callable[[MigratableLink, AnyMessage, memoryview], Awaitable[None]]
OnLost = Callable[[MigratableLink, NetworkError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Keepalive and limits against misbehaving peers."""

    max_accepted_per_peer: int = 4  # connections: a peer that reconnects early against one that hoards slots
    max_pending_pongs: int = 16  # being sent and not yet read by the peer: more is a ping flood
    keepalive_interval_s: float | None = 5.0  # fast failure detection against idle traffic; None: never ping
    keepalive_misses: int = 3  # silent intervals that a link survives: loss against fast failure detection
    path_switch_timeout_s: float = 10.0  # between a peer's PathSwitch on one path and on the other


class _PooledLink(MigratableLink):
    """A live link and the pool's state for it."""

    def __init__(self, connection: Connection, outgoing: bool) -> None:
        super().__init__(connection, outgoing)
        self.pings: dict[int, asyncio.Future[float]] = {}  # nonce -> loop time of its pong
        self.pending_pongs = 0  # being sent
        self.first_frame = True  # none received yet
        self.active = True  # a frame was received since the last keepalive tick
        self.missed_ticks = 0  # in a row without a frame
        self.migrated_to: _PooledLink | None = None  # the link whose new path this connection is; it reads it now


class _PendingSwitch:
    """A peer's path switch of which one half has been received: it completes with the new path and the link."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.new_path: asyncio.Future[Connection] = loop.create_future()
        self.link: asyncio.Future[_PooledLink] = loop.create_future()


class ConnectionPool:
    """`get` a link to a peer, send on it; what is received is passed to `on_frame`.

    `on_frame(link, message, body)` is awaited by the link's reader, one frame at a time and in order. While it runs,
    back-pressure slows the sender on this connection only. It may send short replies; bulk should not be sent from it,
    or two peers that both do so deadlock. If it raises ProtocolError the connection is closed and a violation of the
    peer recorded. `on_lost(link, error)` is awaited once for every link that ends, except by `close`.
    """

    def __init__(
        self,
        transport: Transport,
        on_frame: OnFrame,
        on_lost: OnLost | None = None,
        limits: Limits | None = None,
        policy: PoolPolicy = PoolPolicy(),
    ) -> None:
        self._transport = transport
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._limits = limits or Limits()
        self._policy = policy
        self.violations = ProtocolViolations(self._limits.max_protocol_errors)  # shared with the services on top
        self._tasks = TaskSet(f"pool of {transport.peer[-6:]}")
        self._links: set[_PooledLink] = set()
        self._outgoing: dict[PeerId, _PooledLink] = {}
        self._dialling: dict[PeerId, asyncio.Future[_PooledLink]] = {}
        self._pending_switches: dict[tuple[PeerId, int], _PendingSwitch] = {}
        self._nonces = itertools.count()
        self._keepalive_task: asyncio.Task[None] | None = None
        if isinstance(transport, UpgradingTransport):
            transport.on_upgrade(self._upgrade)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __len__(self) -> int:
        """Live connections, both ways."""
        return len(self._links)

    @property
    def peer(self) -> PeerId:
        return self._transport.peer

    @property
    def dialled(self) -> tuple[PeerId, ...]:
        """The peers that we hold a connection with which we opened ourselves."""
        return tuple(self._outgoing)

    def has_dialled(self, peer: PeerId) -> bool:
        """Whether it is one of `dialled`."""
        return peer in self._outgoing

    async def serve(self) -> None:
        """Accept connections from now on. A client, which only dials, does not call this."""
        await self._transport.serve(self._accept)

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> MigratableLink:
        """The link to `peer`, dialled if there is none. Raises PeerUnreachable, after `timeout_s` at the latest.

        The dial, which other callers may share, continues after that, for `Limits.dial_timeout_s` in all.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(peer, addresses)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer within {timeout_s:g} s") from None

    async def _get(self, peer: PeerId, addresses: Sequence[str]) -> _PooledLink:
        if (link := self._outgoing.get(peer)) is not None:
            return link
        if self._tasks.closed:
            raise PeerUnreachable("this end is shutting down")
        if self.violations.refuses(peer):
            raise PeerUnreachable(f"{peer} has broken the protocol too often and is refused")
        dial = self._dialling.get(peer)
        if dial is None:
            dial = self._dialling[peer] = asyncio.get_running_loop().create_future()
            self._tasks.start(self._dial(peer, tuple(addresses), dial), f"to {peer}")
        return await asyncio.shield(dial)

    async def rtt(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float = 5.0) -> float:
        """The round trip to `peer` in ms; dials if necessary. Raises PeerUnreachable, ConnectionLost."""
        link = await self._get(peer, addresses)
        if link not in self._links:
            raise ConnectionLost(f"the connection to {peer} was lost")
        loop = asyncio.get_running_loop()
        nonce, answer = next(self._nonces), loop.create_future()
        link.pings[nonce] = answer
        try:
            async with asyncio.timeout(timeout_s):
                sent = loop.time()
                await link.send(Ping(nonce))
                return float((await answer - sent) * 1e3)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer a ping within {timeout_s:g} s") from None
        finally:
            link.pings.pop(nonce, None)

    async def reject(self, link: MigratableLink, error: ProtocolError) -> None:
        """Close a link for something received on it and record a violation, as if `on_frame` had raised."""
        if link in self._links and link.reason is None:
            await link.close(error)
            await self._record_violation(link.peer, error)

    async def drop(self, peer: PeerId, reason: str = "it was given up") -> None:
        """Close every connection with `peer`; `on_lost` gets `reason`."""
        for link in [link for link in self._links if link.peer == peer]:
            await link.close(ConnectionLost(f"the connection to {peer} was closed: {reason}"))

    async def close(self) -> None:
        """Close every connection and end every task; the transport stays open. Idempotent."""
        await self._tasks.close()

    # One task for each connection, dialled or accepted.

    async def _dial(self, peer: PeerId, addresses: tuple[str, ...], result: asyncio.Future[_PooledLink]) -> None:
        """Dial, resolve `result` for all waiting callers, and read the connection to its end."""
        failure = PeerUnreachable("this end is shutting down")
        try:
            link = self._add(await self._connect(peer, addresses), outgoing=True)
            self._outgoing[peer] = link
            result.set_result(link)
        except PeerUnreachable as error:
            failure = error
            return
        finally:
            del self._dialling[peer]
            if not result.done():
                result.set_exception(failure)
                result.exception()  # every waiting caller may have been cancelled
        await self._read(link)

    async def _connect(self, peer: PeerId, addresses: tuple[str, ...]) -> Connection:
        if len(self._links) >= self._limits.max_connections:
            raise PeerUnreachable(f"{len(self._links)} connections are open already, which is the limit")
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                return await self._transport.dial(peer, addresses)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer within {self._limits.dial_timeout_s:g} s") from None

    async def _accept(self, connection: Connection) -> None:
        peer = connection.peer
        same = sum(1 for link in self._links if link.peer == peer and not link.outgoing)
        full = same >= self._policy.max_accepted_per_peer or len(self._links) >= self._limits.max_connections
        if full or self._tasks.closed or self.violations.refuses(peer):
            logger.debug("refused a connection from %s", peer)
            await connection.close()
            return
        link = self._add(connection, outgoing=False)
        reader = self._tasks.start(self._read(link), f"from {peer}")
        try:
            await asyncio.wait({reader})
            if link.migrated_to is not None:
                await link.migrated_to.ended.wait()
        finally:
            reader.cancel()

    def _add(self, connection: Connection, outgoing: bool) -> _PooledLink:
        link = _PooledLink(connection, outgoing)
        self._links.add(link)
        interval_s = self._policy.keepalive_interval_s
        if interval_s is not None and (self._keepalive_task is None or self._keepalive_task.done()):
            self._keepalive_task = self._tasks.start(self._keep_alive(interval_s), "keepalive")
        return link

    def _remove(self, link: _PooledLink) -> None:
        self._links.discard(link)
        link.ended.set()
        if self._outgoing.get(link.peer) is link:
            del self._outgoing[link.peer]
        for answer in link.pings.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(f"the connection to {link.peer} was lost"))
                answer.exception()

    async def _read(self, link: _PooledLink) -> None:
        """Dispatch frames until the connection ends, then report that to `on_lost`."""
        error: NetworkError = ConnectionLost(f"the connection to {link.peer} was closed here")
        try:
            while link.migrated_to is None:
                await self._dispatch(link, *await link.receive())
        except ProtocolError as fault:
            error = fault
            await link.close(fault)
            await self._record_violation(link.peer, fault)
        except ConnectionLost as lost:
            error = link.reason or lost
        finally:
            self._remove(link)
            if link.migrated_to is None:
                await link.close()
                if self._on_lost is not None and not self._tasks.closed:
                    await self._on_lost(link, error)

    async def _dispatch(self, link: _PooledLink, message: AnyMessage, body: memoryview) -> None:
        first, link.first_frame = link.first_frame, False
        link.active, link.missed_ticks = True, 0
        if isinstance(message, Ping):
            if link.pending_pongs >= self._policy.max_pending_pongs:
                raise ProtocolError("too many pings whose pongs are not read")
            link.pending_pongs += 1
            self._tasks.start(self._pong(link, message.nonce), f"pong to {link.peer}")
        elif isinstance(message, Pong):
            answer = link.pings.get(message.nonce)
            if answer is not None and not answer.done():
                answer.set_result(asyncio.get_running_loop().time())
        elif isinstance(message, PathSwitch):
            await (self._join_path(link, message.nonce) if first else self._switch_path(link, message.nonce))
        else:
            await self._on_frame(link, message, body)

    async def _pong(self, link: _PooledLink, nonce: int) -> None:
        try:
            await link.send(Pong(nonce))
        except ConnectionLost:
            return  # its reader sees the same
        finally:
            link.pending_pongs -= 1

    # Path switches.

    async def _upgrade(self, old: Connection, new: Connection) -> None:
        """The transport has made a better connection to a peer that it had dialled."""
        link = next((link for link in self._links if link.outgoing and link.path is old), None)
        try:
            if link is None or link.reason is not None:
                await new.close()
            elif await link.switch_path(new):
                logger.info("the link to %s has migrated to a direct connection", link.peer)
        except ConnectionLost:
            await new.close()  # the old path broke; its reader reports that

    async def _join_path(self, link: _PooledLink, nonce: int) -> None:
        """An accepted connection is the new path of another link of its peer's. Raises ProtocolError."""
        async with self._path_switch(link.peer, nonce) as switch:
            if switch.new_path.done():
                raise ProtocolError("a second path for one path switch")
            switch.new_path.set_result(link.path)
            link.migrated_to = await switch.link

    async def _switch_path(self, link: _PooledLink, nonce: int) -> None:
        """The old path has ended; continue on the new one. Raises ProtocolError, ConnectionLost."""
        async with self._path_switch(link.peer, nonce) as switch:
            if switch.link.done():
                raise ProtocolError("a second link for one path switch")
            new = await switch.new_path
            switch.link.set_result(link)
            await link.accept_switch(nonce, new)

    @contextlib.asynccontextmanager
    async def _path_switch(self, peer: PeerId, nonce: int) -> AsyncIterator[_PendingSwitch]:
        switch = self._pending_switches.setdefault((peer, nonce), _PendingSwitch())
        try:
            async with asyncio.timeout(self._policy.path_switch_timeout_s):
                yield switch
        except TimeoutError:
            raise ProtocolError("half a path switch") from None
        finally:
            self._pending_switches.pop((peer, nonce), None)

    async def _record_violation(self, peer: PeerId, error: ProtocolError) -> None:
        """At the limit, close all the peer's connections."""
        if self.violations.record(peer, error):
            await self.drop(peer, f"it has broken the protocol {self._limits.max_protocol_errors} times")

    async def _keep_alive(self, interval_s: float) -> None:
        """Ping idle links and close those that stay silent. Ends with the last connection."""
        while self._links:
            await asyncio.sleep(interval_s)
            for link in list(self._links):
                if link.active:
                    link.active = False
                    continue
                link.missed_ticks += 1
                if link.missed_ticks > self._policy.keepalive_misses:
                    silence_s = interval_s * link.missed_ticks
                    await link.close(ConnectionLost(f"nothing came from {link.peer} for {silence_s:g} s"))
                else:
                    self._tasks.start(self._probe(link, interval_s), f"probe {link.peer}")

    async def _probe(self, link: _PooledLink, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await link.send(Ping(next(self._nonces)))
        except (TimeoutError, ConnectionLost):
            return  # the next tick counts the miss
