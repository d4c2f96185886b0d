"""The client's connection to a swarm: a carrier, the directory behind it, and a pool of connections.

Owns their making and their end. An in-memory `Network` takes their place in tests.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from swarm.config import Libp2pImpl, Limits
from swarm.net.base.transport import Directory, Transport
from swarm.net.libp2p.options import HostOptions
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret
from swarm_client.network.session_demux import SessionDemux


async def _nobody(addresses: Sequence[str]) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class ClientNetwork:
    """`meet`: get to know the peers at these addresses again; how many answered. Raises NetworkError."""

    directory: Directory
    pool: ConnectionPool
    demux: SessionDemux
    rebootstrap: Callable[[Sequence[str]], Awaitable[int]] = _nobody
    wall_clock: Callable[[], float] = time.time  # what the records of this network are dated by
    clock: Callable[[], float] = time.perf_counter  # what rounds are measured by, in seconds

    @classmethod
    def from_transport(
        cls,
        carrier: Transport,
        directory: Directory,
        limits: Limits,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
        meet: Callable[[Sequence[str]], Awaitable[int]] = _nobody,
    ) -> ClientNetwork:
        inboxes = SessionDemux()
        pool = ConnectionPool(carrier, inboxes.on_frame, inboxes.on_lost, limits)
        return cls(directory, pool, inboxes, meet, wall_clock, clock)


@asynccontextmanager
async def connect(
    options: HostOptions,
    limits: Limits,
    *,
    direct: bool = True,
    secret: str = "",
    libp2p_impl: Libp2pImpl = "go",
) -> AsyncIterator[ClientNetwork]:
    """Join the swarm of `options.peers` as a client: it dials out, serves nothing and is gone at the end.

    `direct`: also dial nodes directly, past the p2p daemon. `libp2p_impl`: who speaks libp2p. `secret`: that of a
    private swarm.
    Raises PeerUnreachable when none of them answers, UsageError if `secret` cannot be one.
    """
    keys = await asyncio.to_thread(SwarmSecret, secret) if secret else None
    await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")  # a second in which others can work
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.multi import MultiTransport

    async with AsyncExitStack() as stack:
        carrier = await MultiTransport.start(
            Identity.generate(),
            options,
            direct=direct,
            accept=False,
            secret=keys,
            dial_timeout_s=limits.dial_timeout_s,
            libp2p_impl=libp2p_impl,
        )
        stack.push_async_callback(carrier.close)
        directory = await DhtDirectory.start(carrier.daemon, options.peers, client=True, secret=keys)
        stack.push_async_callback(directory.close)
        network = ClientNetwork.from_transport(carrier, directory, limits, meet=directory.rebootstrap)
        async with network.pool:
            yield network
