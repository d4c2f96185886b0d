"""The client's connection to a swarm: a transport, the directory (DHT) behind it if there is one, and a connection pool.

Owns how they are started and closed. Tests make a ClientNetwork of an in-memory transport.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from swarm.config import DEFAULT_MODEL, ClientConfig, Libp2pImpl, Limits, Transports, state_dir
from swarm.errors import PeerUnreachable, UsageError
from swarm.gossip_messages import Records
from swarm.messages import AnyMessage
from swarm.net.base.happy_eyeballs import staggered_race
from swarm.net.base.tls_addresses import by_peer, is_direct
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
from swarm.types import PeerId
from swarm_client.network.session_demux import SessionDemux

logger = logging.getLogger(__name__)

HAS_HIVEMIND = importlib.util.find_spec("hivemind") is not None
_MAX_KNOWN_PEERS = 8  # joined by at once
_NEXT_DIAL_S = 0.5  # between dials of two peers, for the first that answers


async def _no_peers(addresses: Sequence[str]) -> int:
    return 0


class NoDirectory:
    """In place of a DHT: what is known of nodes is what nodes pass on. See `transport.Directory`."""

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        """A client has no record."""

    async def read(self, model: str) -> dict[PeerId, bytes]:
        return {}


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
    """Join the swarm of `peers`, multiaddrs, as a client: it dials out, serves nothing and is gone at the end. When none
    of them answers, by way of nodes of `model` that were seen there before.

    `network`: the swarm's name. `transport`: see `ClientConfig`. `libp2p_impl`: the libp2p implementation. `secret`:
    that of a private swarm. `identity_file`: of this client's identity, made on first use; None: a new one. Raises
    PeerUnreachable when nobody answers, UsageError if `secret` cannot be one or the transport is not there.
    """
    own = await asyncio.to_thread(Identity.load_or_create, identity_file) if identity_file else Identity.generate()
    keys = await asyncio.to_thread(SwarmSecret, secret) if secret else None
    file = RecordFile.of(state_dir() / "records", model, peers, network, secret)
    if chooses_direct(transport, peers):
        joined = partial(_over_tls, own, keys, limits, file)
    else:
        joined = partial(_over_libp2p, own, keys, limits, file, transport != "libp2p", libp2p_impl)
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


def chooses_direct(transport: Transports, peers: Sequence[str]) -> bool:
    """Whether to do without libp2p: where that was asked for, and where there is no other way. Raises UsageError."""
    if transport == "direct":
        return True
    if transport == "auto" and (not HAS_HIVEMIND or all(map(is_direct, peers))):
        return True
    if not HAS_HIVEMIND:
        raise UsageError(f"--transport {transport} needs hivemind: pip install swarm-llm; or leave it out")
    return False


@asynccontextmanager
async def _over_libp2p(
    own: Identity,
    keys: SwarmSecret | None,
    limits: Limits,
    file: RecordFile,
    direct: bool,
    libp2p_impl: Libp2pImpl,
    peers: Sequence[str],
) -> AsyncIterator[ClientNetwork]:
    """By a libp2p host and the DHT, with direct connections beside them if `direct`. Raises PeerUnreachable."""
    # The import takes a second, which must not block the loop.
    await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.multi import MultiTransport

    async with AsyncExitStack() as stack:
        transport = await MultiTransport.start(
            own,
            HostOptions(peers=tuple(peers)),
            direct=direct,
            accept=False,
            secret=keys,
            dial_timeout_s=limits.dial_timeout_s,
            libp2p_impl=libp2p_impl,
        )
        stack.push_async_callback(transport.close)
        directory = await DhtDirectory.start(transport.daemon, peers, client=True, secret=keys)
        stack.push_async_callback(directory.close)
        connected = ClientNetwork.from_transport(
            transport,
            directory,
            limits,
            rebootstrap=directory.rebootstrap,
            peers=tuple(peers),
            record_file=file,
            sign=own.sign,
        )
        async with connected.pool:
            yield connected


@asynccontextmanager
async def _over_tls(
    own: Identity, keys: SwarmSecret | None, limits: Limits, file: RecordFile, peers: Sequence[str]
) -> AsyncIterator[ClientNetwork]:
    """By direct connections alone, and the records that nodes pass on. Raises PeerUnreachable, UsageError."""
    addresses = by_peer(filter(is_direct, peers))
    if not addresses:
        raise UsageError(
            "none of these addresses is one of a direct connection, which end in /tls/p2p/<peer id>: use an invitation, "
            "or leave --transport out (it takes hivemind: pip install swarm-llm)"
        )
    async with AsyncExitStack() as stack:
        authenticator = keys.authenticate if keys else public_authenticator
        transport = await TlsTransport.start(own, authenticator=authenticator)
        stack.push_async_callback(transport.close)
        connected = ClientNetwork.from_transport(
            transport, NoDirectory(), limits, peers=tuple(peers), record_file=file, sign=own.sign
        )
        await stack.enter_async_context(connected.pool)
        dials = [partial(connected.pool.get, peer, of, limits.dial_timeout_s) for peer, of in addresses.items()]
        await staggered_race(dials, _NEXT_DIAL_S, lambda link: None)
        yield connected
