"""The client's connection to a swarm: a transport, the directory (DHT) behind it, and a connection pool.

Owns how they are started and closed. Tests make a ClientNetwork of an in-memory transport.
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.config import DEFAULT_MODEL, ClientConfig, Libp2pImpl, Limits, state_dir
from swarm.errors import PeerUnreachable, UsageError
from swarm.gossip_messages import Records
from swarm.messages import AnyMessage
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
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.records import Sign
from swarm_client.network.session_demux import SessionDemux

if TYPE_CHECKING:
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.multi import MultiTransport

logger = logging.getLogger(__name__)

_MAX_KNOWN_PEERS = 8  # joined by at once


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
        return RecordReader(
            book,
            self.directory,
            self.pool,
            self.exchange,
            bootstrap=self.peers,
            wall_clock=self.wall_clock,
            rebootstrap=self.rebootstrap,
            file=self.record_file,
        )


def host_options(config: ClientConfig) -> HostOptions:
    """Raises UsageError."""
    if not config.peers:
        raise UsageError("no peers to connect to; give the multiaddr of a node of the swarm")
    return HostOptions(peers=config.peers)


def connect_as(config: ClientConfig, model: str) -> AbstractAsyncContextManager[ClientNetwork]:
    """`connect` as `config` says, for the model of that name."""
    return connect(
        host_options(config),
        config.limits,
        model=model,
        network=config.network,
        direct=config.transport != "libp2p",
        secret=config.secret,
        libp2p_impl=config.libp2p_impl,
        identity_file=config.identity,
    )


@asynccontextmanager
async def connect(
    options: HostOptions,
    limits: Limits,
    *,
    model: str = DEFAULT_MODEL,
    network: str = "",
    direct: bool = True,
    secret: str = "",
    libp2p_impl: Libp2pImpl = "go",
    identity_file: Path | None = None,
) -> AsyncIterator[ClientNetwork]:
    """Join the swarm of `options.peers` as a client: it dials out, serves nothing and is gone at the end. When none of
    them answers, by way of nodes of `model` that were seen there before.

    `network`: the swarm's name. `direct`: also dial nodes over TLS, without libp2p. `libp2p_impl`: the libp2p
    implementation. `secret`: that of a private swarm. `identity_file`: of this client's identity, made on first use;
    None: a new one. Raises PeerUnreachable when nobody answers, UsageError if `secret` cannot be one.
    """
    own = await asyncio.to_thread(Identity.load_or_create, identity_file) if identity_file else Identity.generate()
    keys = await asyncio.to_thread(SwarmSecret, secret) if secret else None
    # The import takes a second, which must not block the loop.
    await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")
    from swarm.net.transports.multi import MultiTransport

    file = RecordFile.of(state_dir() / "records", model, options.peers, network, secret)
    start = partial(
        MultiTransport.start,
        direct=direct,
        accept=False,
        secret=keys,
        dial_timeout_s=limits.dial_timeout_s,
        libp2p_impl=libp2p_impl,
    )
    async with AsyncExitStack() as stack:
        try:
            transport, directory = await stack.enter_async_context(_joined(start, own, options, keys))
        except PeerUnreachable as error:
            known = await asyncio.to_thread(file.addresses, model, _MAX_KNOWN_PEERS)
            if not known:
                raise
            logger.warning("%s; trying %d nodes of this swarm that were there before", error, len(known))
            options = replace(options, peers=known)
            transport, directory = await stack.enter_async_context(_joined(start, own, options, keys))
        connected = ClientNetwork.from_transport(
            transport,
            directory,
            limits,
            rebootstrap=directory.rebootstrap,
            peers=options.peers,
            record_file=file,
            sign=own.sign,
        )
        async with connected.pool:
            yield connected


@asynccontextmanager
async def _joined(
    start: Callable[[Identity, HostOptions], Awaitable[MultiTransport]],
    own: Identity,
    options: HostOptions,
    keys: SwarmSecret | None,
) -> AsyncIterator[tuple[MultiTransport, DhtDirectory]]:
    """Raises PeerUnreachable."""
    from swarm.net.dht.directory import DhtDirectory

    async with AsyncExitStack() as stack:
        transport = await start(own, options)
        stack.push_async_callback(transport.close)
        directory = await DhtDirectory.start(transport.daemon, options.peers, client=True, secret=keys)
        stack.push_async_callback(directory.close)
        yield transport, directory
