"""The client's connection to a swarm: a transport, the directory (DHT) behind it, and a connection pool.

Owns how they are started and closed. Tests make a ClientNetwork of an in-memory transport.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.config import Libp2pImpl, Limits
from swarm.net.base.transport import Directory, Transport
from swarm.net.libp2p.options import HostOptions
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.records import Sign
from swarm_client.network.session_demux import SessionDemux


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
        sign: Sign | None = None,
    ) -> ClientNetwork:
        demux = SessionDemux()
        pool = ConnectionPool(transport, demux.on_frame, demux.on_lost, limits)
        return cls(directory, pool, demux, rebootstrap, wall_clock, clock, sign)


@asynccontextmanager
async def connect(
    options: HostOptions,
    limits: Limits,
    *,
    direct: bool = True,
    secret: str = "",
    libp2p_impl: Libp2pImpl = "go",
    identity: Path | None = None,
) -> AsyncIterator[ClientNetwork]:
    """Join the swarm of `options.peers` as a client: it dials out, serves nothing and is gone at the end.

    `direct`: also dial nodes over TLS, without libp2p. `libp2p_impl`: the libp2p implementation. `secret`: that of a
    private swarm. `identity`: the file of this client's, made on first use; None: a new one.

    Raises PeerUnreachable when none of them answers, UsageError if `secret` cannot be one.
    """
    own = await asyncio.to_thread(Identity.load_or_create, identity) if identity else Identity.generate()
    keys = await asyncio.to_thread(SwarmSecret, secret) if secret else None
    # The import takes a second, which must not block the loop.
    await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.multi import MultiTransport

    async with AsyncExitStack() as stack:
        transport = await MultiTransport.start(
            own,
            options,
            direct=direct,
            accept=False,
            secret=keys,
            dial_timeout_s=limits.dial_timeout_s,
            libp2p_impl=libp2p_impl,
        )
        stack.push_async_callback(transport.close)
        directory = await DhtDirectory.start(transport.daemon, options.peers, client=True, secret=keys)
        stack.push_async_callback(directory.close)
        network = ClientNetwork.from_transport(
            transport, directory, limits, rebootstrap=directory.rebootstrap, sign=own.sign
        )
        async with network.pool:
            yield network
