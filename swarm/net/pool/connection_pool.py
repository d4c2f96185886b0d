"""The connections of one peer, shared by all its sessions.

Owns who is connected: at most one outgoing connection a peer, dialled once however many ask; one reader task for every
connection, dialled or accepted; pings; cutting off who has broken the protocol too often (`violations`); links that
move to a better path (`link`) when the transport finds one. Knows no session and no message but `Ping`, `Pong`, `Move`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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

MAX_ACCEPTED_PER_PEER = 4
MAX_PONGS = 16  # answers a peer may leave unread
KEEPALIVE_S = 5.0
KEEPALIVE_MISSES = 3
MOVE_TIMEOUT_S = 10.0  # between a peer's Move on one path and on the other


class _PooledLink(MigratableLink):
    """A live link and what the pool keeps about it."""

    def __init__(self, connection: Connection, outgoing: bool) -> None:
        super().__init__(connection, outgoing)
        self.pings: dict[int, asyncio.Future[float]] = {}  # nonce -> when its pong came, loop time
        self.pongs = 0  # being sent
        self.fresh = True  # nothing has come yet
        self.heard = True  # a frame came since the last keepalive tick
        self.misses = 0  # ticks in silence
        self.adopter: _PooledLink | None = None  # the link whose new path this was; it reads it now


class _PendingSwitch:
    """Where the two paths of a peer's move meet: the new one arrives, the link it belongs to takes it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.arrived: asyncio.Future[Connection] = loop.create_future()
        self.taken: asyncio.Future[_PooledLink] = loop.create_future()


class ConnectionPool:
    """`get` a link to a peer, send on it; what comes back is handed to `on_frame`.

    `on_frame(link, message, body)` is awaited by the link's reader, one frame at a time and in order. It
    may take its time: only this connection waits, and its sender is slowed down. Short answers may be sent from it;
    bulk should not be, or two peers that both do so can block each other for good. If it raises ProtocolError the
    connection is closed and a violation of the peer recorded. `on_lost(link, error)` is awaited once for every link
    that ends, except by `close`.

    `keepalive_s`: a connection silent for four such intervals, pings included, is given up; None never pings.
    """

    def __init__(
        self,
        transport: Transport,
        on_frame: OnFrame,
        on_lost: OnLost | None = None,
        limits: Limits | None = None,
        keepalive_s: float | None = KEEPALIVE_S,
    ) -> None:
        self._transport = transport
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._limits = limits or Limits()
        self.violations = ProtocolViolations(self._limits.max_protocol_errors)  # shared with those who serve its frames
        self._keepalive_s = keepalive_s
        self._tasks = TaskSet(f"pool of {transport.peer[-6:]}")
        self._links: set[_PooledLink] = set()
        self._outgoing: dict[PeerId, _PooledLink] = {}
        self._dialling: dict[PeerId, asyncio.Future[_PooledLink]] = {}
        self._moves: dict[tuple[PeerId, int], _PendingSwitch] = {}
        self._nonces = itertools.count()
        self._keeper: asyncio.Task[None] | None = None
        if isinstance(transport, UpgradingTransport):
            transport.on_upgrade(self._move)

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

    async def serve(self) -> None:
        """Accept connections from now on. A client, which only dials, does not call this."""
        await self._transport.serve(self._accept)

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> MigratableLink:
        """The link to `peer`, dialled if there is none. Raises PeerUnreachable, after `timeout_s` at the latest.

        A dial that others may wait for too goes on after that, for `Limits.dial_timeout_s` in all.
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
        """Milliseconds of one round trip to `peer`, dialled if need be. Raises PeerUnreachable, ConnectionLost."""
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
        """Close a link for something that came over it and record a violation, as if `on_frame` had raised."""
        if link in self._links and link.reason is None:
            await link.close(error)
            await self._record_violation(link.peer, error)

    async def drop(self, peer: PeerId, reason: str = "it was given up") -> None:
        """Close every connection with `peer`; `on_lost` is told `reason`."""
        for link in [link for link in self._links if link.peer == peer]:
            await link.close(ConnectionLost(f"the connection to {peer} was closed: {reason}"))

    async def close(self) -> None:
        """Close every connection and end every task; the transport stays open. Idempotent."""
        await self._tasks.close()

    # One task for each connection, dialled or accepted.

    async def _dial(self, peer: PeerId, addresses: tuple[str, ...], result: asyncio.Future[_PooledLink]) -> None:
        """Dial, tell all who wait for it, and read the connection to its end."""
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
                result.exception()  # whoever waited may have been cancelled
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
        full = same >= MAX_ACCEPTED_PER_PEER or len(self._links) >= self._limits.max_connections
        if full or self._tasks.closed or self.violations.refuses(peer):
            logger.debug("refused a connection from %s", peer)
            await connection.close()
            return
        link = self._add(connection, outgoing=False)
        reader = self._tasks.start(self._read(link), f"from {peer}")
        try:
            await asyncio.wait({reader})
            if link.adopter is not None:
                await link.adopter.ended.wait()
        finally:
            reader.cancel()

    def _add(self, connection: Connection, outgoing: bool) -> _PooledLink:
        link = _PooledLink(connection, outgoing)
        self._links.add(link)
        if self._keepalive_s is not None and (self._keeper is None or self._keeper.done()):
            self._keeper = self._tasks.start(self._keep_alive(self._keepalive_s), "keepalive")
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
        """Hand on frames until the connection ends, then say so."""
        error: NetworkError = ConnectionLost(f"the connection to {link.peer} was closed here")
        try:
            while link.adopter is None:
                await self._dispatch(link, *await link.receive())
        except ProtocolError as fault:
            error = fault
            await link.close(fault)
            await self._record_violation(link.peer, fault)
        except ConnectionLost as lost:
            error = link.reason or lost
        finally:
            self._remove(link)
            if link.adopter is None:
                await link.close()
                if self._on_lost is not None and not self._tasks.closed:
                    await self._on_lost(link, error)

    async def _dispatch(self, link: _PooledLink, message: AnyMessage, body: memoryview) -> None:
        fresh, link.fresh = link.fresh, False
        link.heard, link.misses = True, 0
        if isinstance(message, Ping):
            if link.pongs >= MAX_PONGS:
                raise ProtocolError("too many pings whose answers are not read")
            link.pongs += 1
            self._tasks.start(self._pong(link, message.nonce), f"pong to {link.peer}")
        elif isinstance(message, Pong):
            answer = link.pings.get(message.nonce)
            if answer is not None and not answer.done():
                answer.set_result(asyncio.get_running_loop().time())
        elif isinstance(message, PathSwitch):
            await (self._join_path(link, message.nonce) if fresh else self._switch_path(link, message.nonce))
        else:
            await self._on_frame(link, message, body)

    async def _pong(self, link: _PooledLink, nonce: int) -> None:
        try:
            await link.send(Pong(nonce))
        except ConnectionLost:
            return  # its reader sees the same
        finally:
            link.pongs -= 1

    # Links that move.

    async def _move(self, old: Connection, new: Connection) -> None:
        """The transport has found a better way to a peer that it had dialled."""
        link = next((link for link in self._links if link.outgoing and link.path is old), None)
        try:
            if link is None or link.reason is not None:
                await new.close()
            elif await link.switch_path(new):
                logger.info("the connection to %s has moved to a direct one", link.peer)
        except ConnectionLost:
            await new.close()  # the old path broke; its reader says so

    async def _join_path(self, link: _PooledLink, nonce: int) -> None:
        """An accepted connection turns out to be the new path of another link of its peer's. Raises ProtocolError."""
        async with self._path_switch(link.peer, nonce) as move:
            if move.arrived.done():
                raise ProtocolError("a second path for one move")
            move.arrived.set_result(link.path)
            link.adopter = await move.taken

    async def _switch_path(self, link: _PooledLink, nonce: int) -> None:
        """The old path has said its last; go on over the new one. Raises ProtocolError, ConnectionLost."""
        async with self._path_switch(link.peer, nonce) as move:
            if move.taken.done():
                raise ProtocolError("a second link for one move")
            new = await move.arrived
            move.taken.set_result(link)
            await link.accept_switch(nonce, new)

    @contextlib.asynccontextmanager
    async def _path_switch(self, peer: PeerId, nonce: int) -> AsyncIterator[_PendingSwitch]:
        move = self._moves.setdefault((peer, nonce), _PendingSwitch())
        try:
            async with asyncio.timeout(MOVE_TIMEOUT_S):
                yield move
        except TimeoutError:
            raise ProtocolError("half a move") from None
        finally:
            self._moves.pop((peer, nonce), None)

    async def _record_violation(self, peer: PeerId, error: ProtocolError) -> None:
        """At the limit, cut all the peer's connections."""
        if self.violations.record(peer, error):
            await self.drop(peer, f"it has broken the protocol {self._limits.max_protocol_errors} times")

    async def _keep_alive(self, interval_s: float) -> None:
        """Ping what is silent, give up what stays so. Ends with the last connection."""
        while self._links:
            await asyncio.sleep(interval_s)
            for link in list(self._links):
                if link.heard:
                    link.heard = False
                    continue
                link.misses += 1
                if link.misses > KEEPALIVE_MISSES:
                    silence = interval_s * link.misses
                    await link.close(ConnectionLost(f"nothing came from {link.peer} for {silence:g} s"))
                else:
                    self._tasks.start(self._probe(link, interval_s), f"probe {link.peer}")

    async def _probe(self, link: _PooledLink, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await link.send(Ping(next(self._nonces)))
        except (TimeoutError, ConnectionLost):
            return  # silence is counted by the next tick
