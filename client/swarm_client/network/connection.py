"""The client's connection to a swarm: a transport, the directory (DHT) behind it, and a connection pool.

Owns how they are started and closed; when libp2p is, is `deferred_libp2p`'s. Tests make a ClientNetwork of an
in-memory transport.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.config import DEFAULT_MODEL, ClientConfig, Libp2pImpl, Limits, Transports, state_dir
from swarm.errors import NetworkError, PeerUnreachable, UsageError, WrongSwarm
from swarm.extras import HAS_HIVEMIND, INSTALL_NODE, needs
from swarm.gossip_messages import Records
from swarm.messages import AnyMessage
from swarm.net.base.happy_eyeballs import staggered_race
from swarm.net.base.tls_addresses import by_peer, is_direct, libp2p_addresses
from swarm.net.base.transport import Directory, Transport
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordExchange
from swarm.net.gossip.record_file import RecordFile
from swarm.net.gossip.record_reader import RecordReader
from swarm.net.libp2p.options import HostOptions
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.security import identity
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret, public_authenticator
from swarm.net.transports.tls import TlsTransport
from swarm.records import Sign
from swarm_client.network.deferred_libp2p import DeferredLibp2p, StartLibp2p
from swarm_client.network.session_demux import SessionDemux

if TYPE_CHECKING:
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.libp2p_streams import Libp2pTransport

logger = logging.getLogger(__name__)

_MAX_KNOWN_PEERS = 8  # joined by at once
_NEXT_DIAL_S = 0.5  # between dials of two peers, for the first that answers


async def _no_peers(addresses: Sequence[str]) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class ClientNetwork:
    """`rebootstrap`: rejoin the DHT through peers at these addresses; how many answered. Raises NetworkError."""

    directory: Directory
    pool: ConnectionPool
    demux: SessionDemux
    rebootstrap: Callable[[Sequence[str]], Awaitable[int]] = _no_peers
    wall_clock: Callable[[], float] = time.time  # dates records, seconds since the epoch
    clock: Callable[[], float] = time.perf_counter  # measures iterations, in seconds
    exchange: RecordExchange = field(default_factory=RecordExchange)
    peers: tuple[str, ...] = ()  # multiaddrs that it was connected by
    record_file: RecordFile | None = None  # where the nodes that it learns of are kept
    sign: Sign | None = None  # receipts, by the key of `pool.peer`; None: none are sent

    @classmethod
    def from_transport(
        cls,
        transport: Transport,
        directory: Directory,
        limits: Limits,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
        rebootstrap: Callable[[Sequence[str]], Awaitable[int]] = _no_peers,
        peers: Sequence[str] = (),
        record_file: RecordFile | None = None,
        sign: Sign | None = None,
    ) -> ClientNetwork:
        demux, exchange = SessionDemux(), RecordExchange()

        async def on_frame(link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
            if isinstance(message, Records):
                exchange.on_records(link.peer, message, body)
            else:
                await demux.on_frame(link, message, body)

        pool = ConnectionPool(transport, on_frame, demux.on_lost, limits)
        return cls(directory, pool, demux, rebootstrap, wall_clock, clock, exchange, tuple(peers), record_file, sign)

    def record_reader(self, model: str, num_layers: int) -> RecordReader:
        """A new reader of the records of one model. Close it before the pool."""
        rng = random.Random(os.urandom(16))
        book = RecordBook(model, num_layers, identity.verify, rng, is_connected=self.pool.has_dialled)
        reader = RecordReader(
            book,
            self.directory,
            self.pool,
            self.exchange,
            bootstrap=self.peers,
            wall_clock=self.wall_clock,
            rebootstrap=self.rebootstrap,
            file=self.record_file,
        )
        if isinstance(self.directory, DeferredLibp2p):
            self.directory.is_lacking = lambda: reader.is_lacking
        return reader


def check_peers(config: ClientConfig) -> None:
    """Raises UsageError."""
    if not config.peers:
        raise UsageError("no peers to connect to; give the multiaddr of a node of the swarm")
    HostOptions(peers=config.peers)


def connect_as(config: ClientConfig, model: str) -> AbstractAsyncContextManager[ClientNetwork]:
    """`connect` as `config` says, for the model of that name. Raises UsageError."""
    check_peers(config)
    return connect(
        config.peers,
        config.limits,
        model=model,
        network=config.network,
        transport=config.transport,
        secret=config.secret,
        libp2p_impl=config.libp2p_impl,
        identity_file=config.identity,
    )


@asynccontextmanager
async def connect(
    peers: Sequence[str],
    limits: Limits,
    *,
    model: str = DEFAULT_MODEL,
    network: str = "",
    transport: Transports = "auto",
    secret: str = "",
    libp2p_impl: Libp2pImpl = "go",
    identity_file: Path | None = None,
) -> AsyncIterator[ClientNetwork]:
    """Join the swarm of `peers`, multiaddrs, as a client: it dials out, serves nothing and is gone at the end. When
    none of them answers, by way of nodes of `model` that were seen there before.

    `network`: the swarm's name. `transport`: see `ClientConfig`. `libp2p_impl`: the libp2p implementation. `secret`:
    that of a private swarm. `identity_file`: of this client's identity, made on first use; None: a new one. Raises
    PeerUnreachable when nobody answers, UsageError if `secret` cannot be one or the transport is not there.
    """
    own = await asyncio.to_thread(Identity.load_or_create, identity_file) if identity_file else Identity.generate()
    keys = await asyncio.to_thread(SwarmSecret, secret) if secret else None
    file = RecordFile.of(state_dir() / "records", model, peers, network, secret)
    joined = partial(_joined, _Joining(own, keys, limits, transport, libp2p_impl, file))
    async with AsyncExitStack() as stack:
        try:
            connected = await stack.enter_async_context(joined(peers))
        except PeerUnreachable as error:
            known = await asyncio.to_thread(file.addresses, model, _MAX_KNOWN_PEERS)
            if not known:
                raise
            logger.warning("%s; trying %d nodes of this swarm that were there before", error, len(known))
            connected = await stack.enter_async_context(joined(known))
        yield connected


@dataclass(frozen=True, slots=True)
class _Joining:
    """How a client joins, by whichever peers."""

    own: Identity
    keys: SwarmSecret | None
    limits: Limits
    transport: Transports
    libp2p_impl: Libp2pImpl
    file: RecordFile

    def starts_libp2p(self, peers: Sequence[str]) -> StartLibp2p | None:
        """None where there is no libp2p, or nobody to join by it. Raises UsageError where there is no other way."""
        addresses = libp2p_addresses(peers)
        if self.transport != "direct" and HAS_HIVEMIND and addresses:
            return partial(self._start_libp2p, addresses)
        if self.transport == "libp2p":
            if not HAS_HIVEMIND:
                raise needs("hivemind", "the transport 'libp2p'")
            raise UsageError("the transport 'libp2p' needs the address of a peer without /tls/, which is another one's")
        if len(addresses) == len(peers):
            raise UsageError(
                "these peers have no address of direct connections, which end in /tls/p2p/<peer id>: use an invitation"
                + ("" if HAS_HIVEMIND else f", or libp2p: {INSTALL_NODE}")
            )
        return None

    async def tls(self) -> TlsTransport | None:
        """Direct connections; None where they are turned off. Raises NetworkError if this system cannot have them."""
        if self.transport == "libp2p":
            return None
        authenticator = self.keys.authenticate if self.keys else public_authenticator
        try:
            return await TlsTransport.start(self.own, authenticator=authenticator)
        except NetworkError as error:
            if self.transport == "direct" or not HAS_HIVEMIND:
                raise
            logger.warning("no direct connections, everything goes through the p2p daemon: %s", error)
            return None

    async def _start_libp2p(self, peers: Sequence[str]) -> tuple[Libp2pTransport, DhtDirectory]:
        """See `StartLibp2p`."""
        # The import takes a second, which must not block the loop.
        await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")
        from swarm.net.dht.directory import DhtDirectory
        from swarm.net.transports.libp2p_streams import Libp2pTransport

        host = await Libp2pTransport.start(
            self.own,
            HostOptions(peers=tuple(peers)),
            dial_timeout_s=self.limits.dial_timeout_s,
            authenticator=self.keys.authenticate if self.keys else None,
            libp2p_impl=self.libp2p_impl,
        )
        try:
            return host, await DhtDirectory.start(host, peers, client=True, secret=self.keys)
        except BaseException:
            await host.close()
            raise


@asynccontextmanager
async def _joined(joining: _Joining, peers: Sequence[str]) -> AsyncIterator[ClientNetwork]:
    """Raises PeerUnreachable, UsageError."""
    start, limits = joining.starts_libp2p(peers), joining.limits
    tls = await joining.tls()
    async with AsyncExitStack() as stack:
        transport = DeferredLibp2p(joining.own.peer, tls, start)
        stack.push_async_callback(transport.close)
        connected = ClientNetwork.from_transport(
            transport,
            transport,
            limits,
            rebootstrap=transport.rebootstrap,
            peers=tuple(peers),
            record_file=joining.file,
            sign=joining.own.sign,
        )
        await stack.enter_async_context(connected.pool)
        addresses = by_peer(filter(is_direct, peers)) if tls is not None else {}
        dials = [partial(connected.pool.get, peer, of, limits.dial_timeout_s) for peer, of in addresses.items()]
        try:
            if not dials:
                raise PeerUnreachable("no peer to dial directly")
            await staggered_race(dials, _NEXT_DIAL_S, lambda link: None)
        except PeerUnreachable as error:
            if start is None or isinstance(error, WrongSwarm):
                raise
            await transport.started()  # by peers that have other addresses
        yield connected
