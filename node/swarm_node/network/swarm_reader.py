"""A swarm as somebody sees it who only looks: the directory merged with the records that its peers pass on, as a client
has it.

Owns how that reader is put together. It serves nothing, keeps no file, and takes the model's depth from the records
(`swarm.net.gossip.model_depth`), since it does not open the model.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from swarm.config import Libp2pImpl
from swarm.errors import ProtocolError
from swarm.gossip_messages import Records
from swarm.messages import AnyMessage
from swarm.net.base.transport import Directory, Transport
from swarm.net.gossip.policy import GossipPolicy
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordExchange
from swarm.net.gossip.record_reader import RecordReader
from swarm.net.libp2p.options import HostOptions
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.security.identity import Identity, verify
from swarm.net.security.swarm_secret import SwarmSecret

_PATIENT = GossipPolicy(first_without_directory=False)
"""Who looks once wants to see everybody, not to start soon."""


@asynccontextmanager
async def swarm_reader(
    model: str, peers: Sequence[str], secret: str, libp2p_impl: Libp2pImpl
) -> AsyncIterator[RecordReader]:
    """A reader of the swarm of `model` that `peers` (multiaddrs) belong to, with an identity of its own.

    Raises PeerUnreachable if none of them answers, UsageError if `secret` cannot be one, NetworkError.
    """
    keys = await asyncio.to_thread(SwarmSecret, secret) if secret else None
    await asyncio.to_thread(importlib.import_module, "swarm.net.dht.directory")  # slow, and signals are handled
    from swarm.net.dht.directory import DhtDirectory
    from swarm.net.transports.multi import MultiTransport

    async with AsyncExitStack() as stack:
        transport = await MultiTransport.start(
            Identity.generate(), HostOptions(peers=tuple(peers)), accept=False, secret=keys, libp2p_impl=libp2p_impl
        )
        stack.push_async_callback(transport.close)
        directory = await DhtDirectory.start(transport.daemon, peers, client=True, secret=keys)
        stack.push_async_callback(directory.close)
        yield await stack.enter_async_context(merged(model, peers, transport, directory))


@asynccontextmanager
async def merged(
    model: str, peers: Sequence[str], transport: Transport, directory: Directory
) -> AsyncIterator[RecordReader]:
    """A reader of `directory`, and of the peers that `transport` reaches, `peers` first."""
    exchange = RecordExchange()

    async def on_frame(link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        if not isinstance(message, Records):
            raise ProtocolError(f"a node sent a {type(message).__name__} to somebody who only looks")
        exchange.on_records(link.peer, message, body)

    async with ConnectionPool(transport, on_frame) as pool:
        named = [address.rpartition("/p2p/")[2] for address in peers]
        rng = random.Random(os.urandom(16))
        book = RecordBook(model, None, verify, rng, named=named, is_connected=pool.has_dialled)
        reader = RecordReader(book, directory, pool, exchange, bootstrap=peers, policy=_PATIENT)
        try:
            yield reader
        finally:
            await reader.close()
