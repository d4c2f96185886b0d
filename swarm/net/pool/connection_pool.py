"""The connections of one peer, shared by all its sessions.

Owns the set of connections: at most one outgoing connection a peer, dialled once for all concurrent callers; one reader
task for every connection, dialled or accepted; keepalive pings; refusing peers with too many protocol violations
(`violations`); who makes way when there is no room (`eviction`); how fast each is read (`frame_budgets`); migrating
links to a better path (`migratable_link`) when the transport finds one. Knows no session and no message but `Ping`,
`Pong`, `PathSwitch`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from swarm.address_blocks import block_of_ip
from swarm.codec import UndecodableFrame
from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable, ProtocolError
from swarm.messages import AnyMessage, PathSwitch, Ping, Pong
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Connection, Transport, UpgradingTransport
from swarm.net.pool.eviction import NO_ROOM, EvictionPolicy
from swarm.net.pool.frame_budgets import FrameBudgetPolicy, FrameBudgets, undecodable_price
from swarm.net.pool.link_uses import LinkUses
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.pool.path_switches import PathSwitches
from swarm.net.pool.pooled_link import PooledLink
from swarm.net.pool.violations import ProtocolViolations
from swarm.types import PeerId

logger = logging.getLogger(__name__)

OnFrame = Callable[[MigratableLink, AnyMessage, memoryview], Awaitable[None]]
OnLost = Callable[[MigratableLink, NetworkError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Keepalive and limits against misbehaving peers."""

    eviction: EvictionPolicy = field(default_factory=EvictionPolicy)
    budgets: FrameBudgetPolicy = field(default_factory=FrameBudgetPolicy)
    max_former_peers: int = 1024  # remembered as having used this node
    use_believed_s: float = 0.5  # how long a link's use is believed: fresh against the time that a look takes
    max_pause_s: float = 5.0  # of a reader, before each frame
    max_accepted_per_peer: int = 4  # connections: a peer that reconnects early against one that hoards slots
    max_pending_pongs: int = 16  # being sent and not yet read by the peer: more is a ping flood
    keepalive_interval_s: float | None = 5.0  # fast failure detection against idle traffic; None: never ping
    keepalive_misses: int = 3  # silent intervals that a link survives: loss against fast failure detection
    path_switch_timeout_s: float = 10.0  # between a peer's PathSwitch on one path and on the other


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
        uses: Callable[[PeerId], bool] | None = None,
    ) -> None:
        """`uses`: whether something that runs here needs the links with a peer; see `LinkUses`."""
        self._link_uses = LinkUses(uses, policy.use_believed_s, policy.max_former_peers)
        self._budgets = FrameBudgets(asyncio.get_running_loop().time, policy.budgets)
        self._transport = transport
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._limits = limits or Limits()
        self._policy = policy
        self.violations = ProtocolViolations(self._limits.max_protocol_errors)  # shared with the services on top
        self._tasks = TaskSet(f"pool of {transport.peer[-6:]}")
        self._links: set[PooledLink] = set()
        self._outgoing: dict[PeerId, PooledLink] = {}
        self._dialling: dict[PeerId, asyncio.Future[PooledLink]] = {}
        self._path_switches = PathSwitches(policy.path_switch_timeout_s)
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

    async def _get(self, peer: PeerId, addresses: Sequence[str]) -> PooledLink:
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

    async def _dial(self, peer: PeerId, addresses: tuple[str, ...], result: asyncio.Future[PooledLink]) -> None:
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
        if not self._make_room(peer, None):
            raise PeerUnreachable(f"{len(self._links)} connections are open already, which is the limit")
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                return await self._transport.dial(peer, addresses)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer within {self._limits.dial_timeout_s:g} s") from None

    async def _accept(self, connection: Connection) -> None:
        peer = connection.peer
        same = sum(1 for link in self._links if link.peer == peer and not link.outgoing)
        refused = same >= self._policy.max_accepted_per_peer or self._tasks.closed or self.violations.refuses(peer)
        if refused or not self._make_room(peer, block_of_ip(connection.remote)):
            logger.debug("refused a connection from %s", peer)
            connection.abort()
            return
        link = self._add(connection, outgoing=False)
        reader = self._tasks.start(self._read(link), f"from {peer}")
        try:
            await asyncio.wait({reader})
            if link.migrated_to is not None:
                await link.migrated_to.ended.wait()
        finally:
            reader.cancel()

    def _make_room(self, peer: PeerId, block: str | None) -> bool:
        """Whether one more connection may be added, in place of another if need be; see `eviction`."""
        policy, now = self._policy.eviction, asyncio.get_running_loop().time()
        chosen = self._link_uses.victim(self._links, peer, block, self._limits.max_connections, policy, now)
        if isinstance(chosen, PooledLink):
            self._forget(chosen)  # its reader does the rest
            chosen.abort(ConnectionLost(f"the connection to {chosen.peer} made way for another"))
        return chosen is not NO_ROOM

    def unasked(self, peer: PeerId, what: str) -> None:
        """Charge `peer` for a frame that nobody asked for. Raises ProtocolError once no race explains it any more."""
        link = next((link for link in self._links if link.peer == peer), None)
        if link is not None and not self._budgets.charge_unasked(*self._account(link)):
            raise ProtocolError(f"too many frames that nobody asked for, now {what}")

    def _account(self, link: PooledLink) -> tuple[PeerId, str, bool]:
        """Whom the frames of a link are charged to."""
        return link.peer, link.block, self._link_uses.is_stranger(link, asyncio.get_running_loop().time())

    def _add(self, connection: Connection, outgoing: bool) -> PooledLink:
        link = PooledLink(connection, outgoing)
        self._links.add(link)
        interval_s = self._policy.keepalive_interval_s
        if interval_s is not None and (self._keepalive_task is None or self._keepalive_task.done()):
            self._keepalive_task = self._tasks.start(self._keep_alive(interval_s), "keepalive")
        return link

    def _forget(self, link: PooledLink) -> None:
        """Neither count it nor hand it out any more."""
        self._links.discard(link)
        if self._outgoing.get(link.peer) is link:
            del self._outgoing[link.peer]

    def _remove(self, link: PooledLink) -> None:
        self._forget(link)
        link.ended.set()
        for answer in link.pings.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(f"the connection to {link.peer} was lost"))
                answer.exception()

    async def _read(self, link: PooledLink) -> None:
        """Dispatch frames until the connection ends, then report that to `on_lost`."""
        error: NetworkError = ConnectionLost(f"the connection to {link.peer} was closed here")
        try:
            while link.migrated_to is None:
                if pause_s := self._budgets.wait_s(*self._account(link)):
                    await asyncio.sleep(min(pause_s, self._policy.max_pause_s))
                message, body = await link.receive()
                self._budgets.charge(*self._account(link), message)
                await self._dispatch(link, message, body)
        except ProtocolError as fault:
            error = fault
            if isinstance(fault, UndecodableFrame):
                self._budgets.charge_more(*self._account(link), undecodable_price(fault.size))
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

    async def _dispatch(self, link: PooledLink, message: AnyMessage, body: memoryview) -> None:
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
            switch = self._path_switches.join if first else self._path_switches.follow
            await switch(link, message.nonce)
        else:
            await self._on_frame(link, message, body)

    async def _pong(self, link: PooledLink, nonce: int) -> None:
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

    async def _probe(self, link: PooledLink, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await link.send(Ping(next(self._nonces)))
        except (TimeoutError, ConnectionLost):
            return  # the next tick counts the miss
