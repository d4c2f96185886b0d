"""Records passed on over real libp2p hosts and real directories on this machine, whose key is swallowed."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from gossip_peers import GossipPeer, Swallowed
from record_makers import MODEL, identity

from swarm.net.dht.directory import DhtDirectory
from swarm.net.libp2p.options import HostOptions
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.types import PeerId

pytestmark = pytest.mark.processes


class SwallowedDht(Swallowed):
    """A real directory that everybody publishes in, of which readers get only junk."""

    def __init__(self, real: DhtDirectory) -> None:
        super().__init__({identity(number).peer: b"junk" for number in range(500, 660)})
        self.real = real

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        await self.real.publish(record, model, expires_at)

    async def read(self, model: str) -> dict[PeerId, bytes]:
        await self.real.read(model)
        return await super().read(model)


async def _member(number: int, first: GossipPeer | None, stack: contextlib.AsyncExitStack, is_node: bool) -> GossipPeer:
    peers = first.transport.addresses[:1] if first is not None else ()
    transport = await Libp2pTransport.start(identity(number), HostOptions(peers=peers))
    directory = await DhtDirectory.start(transport, peers, client=not is_node)
    peer = GossipPeer(
        identity(number),
        transport,
        time.time,
        bootstrap=peers,
        directory=SwallowedDht(directory),
        is_node=is_node,
    )
    stack.push_async_callback(peer.close)
    stack.push_async_callback(directory.close)
    if is_node:
        await peer.serve()
    return peer


async def test_with_the_key_swallowed_all_see_each_other_and_a_fresh_client_sees_them_at_once() -> None:
    async with contextlib.AsyncExitStack() as stack:
        nodes: list[GossipPeer] = []
        for number in (1, 2, 3):
            nodes.append(await _member(number, nodes[0] if nodes else None, stack, is_node=True))
        everybody = {node.peer for node in nodes}

        async def live(node: GossipPeer) -> None:
            while True:
                node.publish()
                await node.directory.publish(node.record(), MODEL, time.time() + 12.0)
                await node.reader.snapshot()
                await asyncio.sleep(1.0)

        living = [asyncio.create_task(live(node)) for node in nodes]
        try:
            async with asyncio.timeout(30.0):
                while not all([await node.seen() == everybody for node in nodes]):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            client = await _member(50, nodes[1], stack, is_node=False)
            before = time.monotonic()
            assert await client.seen() == everybody
            assert time.monotonic() - before < 3.0
            assert (await client.reader.snapshot()).rejected_records == {"malformed": 160}
        finally:
            for task in living:
                task.cancel()
            await asyncio.wait(living)
