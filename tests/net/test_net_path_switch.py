"""Links that migrate to a better path, in virtual time: no frame lost, none out of order, whatever fails on the way."""

from __future__ import annotations

import asyncio
import random

import pytest
from transport_conformance import drain
from virtual_clock import run, virtual_time

from swarm.codec import Buffer
from swarm.errors import ConnectionLost, NetworkError
from swarm.messages import AnyMessage, CloseSession, PathSwitch, Ping, SessionOpened
from swarm.net.base.transport import OnUpgrade
from swarm.net.pool.connection_pool import ConnectionPool, PoolPolicy
from swarm.net.pool.migratable_link import MigratableLink
from swarm.testing.memory_network import LinkModel, MemoryConnection, MemoryNetwork, MemoryTransport


class UpgradingMemoryTransport(MemoryTransport):
    """A memory transport whose test reports better connections."""

    found: OnUpgrade
    dialled: list[MemoryConnection]

    def on_upgrade(self, found: OnUpgrade) -> None:
        self.found = found
        self.dialled = []

    async def dial(self, peer: str, addresses: object = ()) -> MemoryConnection:
        self.dialled.append(await super().dial(peer))
        return self.dialled[-1]


class World:
    """A client that upgrades its connection and a node that answers every CloseSession with SessionOpened."""

    def __init__(self, delay_s: float = 0.05) -> None:
        self.network = MemoryNetwork(link=LinkModel(delay_s=delay_s))
        transport = self.network.transport("client")
        transport.__class__ = UpgradingMemoryTransport
        assert isinstance(transport, UpgradingMemoryTransport)
        self.transport = transport
        self.at_node: list[int] = []
        self.at_client: list[int] = []
        self.lost: list[tuple[str, NetworkError]] = []
        self.client = ConnectionPool(self.transport, self.on_client, self.on_lost)
        self.node = ConnectionPool(self.network.transport("node"), self.on_node, self.on_lost)

    async def on_node(self, link: MigratableLink, message: AnyMessage, body: Buffer) -> None:
        assert isinstance(message, CloseSession)
        self.at_node.append(int.from_bytes(message.session, "big"))
        await link.send(SessionOpened(message.session), body)

    async def on_client(self, link: MigratableLink, message: AnyMessage, body: Buffer) -> None:
        assert isinstance(message, SessionOpened)
        self.at_client.append(int.from_bytes(message.session, "big"))

    async def on_lost(self, link: MigratableLink, error: NetworkError) -> None:
        self.lost.append((link.peer, error))

    async def start(self) -> MigratableLink:
        await self.node.serve()
        return await self.client.get("node")

    async def send(self, link: MigratableLink, numbers: range) -> None:
        for i in numbers:
            await link.send(CloseSession(i.to_bytes(16, "big")), bytes(i % 7))

    async def upgrade(self) -> None:
        old = self.transport.dialled[-1]
        await self.transport.found(old, await self.transport.dial("node"))

    async def close(self) -> None:
        for pool in (self.client, self.node):
            await pool.close()
        assert not self.node._path_switches._pending
        assert not self.client._path_switches._pending


@virtual_time
async def test_frames_under_way_are_not_overtaken() -> None:
    world = World(delay_s=1.0)
    link = await world.start()
    await world.send(link, range(5))
    world.network.set_link("client", "node", LinkModel(delay_s=0.001))
    await world.upgrade()
    await world.send(link, range(5, 10))
    await asyncio.sleep(0.5)
    assert world.at_node == [], "the quick ones wait for the slow ones before them"
    await asyncio.sleep(2)
    assert world.at_node == world.at_client == list(range(10))
    assert await world.client.get("node") is link
    assert await world.client.rtt("node") == pytest.approx(2.0)
    assert (len(world.client), len(world.node)) == (1, 1), "one connection a pair"
    assert world.lost == []
    await world.close()


@pytest.mark.parametrize("seed", range(12))
def test_any_interleaving_of_path_switches_and_traffic(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        world = World()
        link = await world.start()
        total = 0

        async def traffic() -> None:
            nonlocal total
            for _ in range(40):
                count = rng.randrange(6)
                await world.send(link, range(total, total + count))
                total += count
                await asyncio.sleep(rng.random() * 0.1)

        async def switches() -> None:
            for _ in range(6):
                await asyncio.sleep(rng.random())
                world.network.set_link("client", "node", LinkModel(delay_s=rng.random() * 0.5))
                await world.upgrade()

        async with asyncio.TaskGroup() as group:
            group.create_task(traffic())
            group.create_task(switches())
        await asyncio.sleep(5)
        assert world.at_node == world.at_client == list(range(total))
        assert all(peer == "client" for peer, _ in world.lost), "at most paths that came during another path switch"
        await world.close()

    run(main())


@virtual_time
async def test_a_better_path_that_breaks_at_once_changes_nothing() -> None:
    world = World()
    link = await world.start()
    new = await world.transport.dial("node")
    await new.close()
    await world.transport.found(world.transport.dialled[0], new)
    await world.send(link, range(3))
    await asyncio.sleep(1)
    assert world.at_client == [0, 1, 2]
    assert [peer for peer, _ in world.lost] == ["client"], "the path that broke, as the node sees it"
    await world.close()


@virtual_time
async def test_a_better_path_to_a_peer_that_is_gone_is_closed() -> None:
    world = World()
    link = await world.start()
    await world.client.drop("node")
    await asyncio.sleep(1)
    assert await world.client.get("node") is not link
    new = await world.transport.dial("node")
    await world.transport.found(world.transport.dialled[0], new)
    with pytest.raises(ConnectionLost):
        await new.receive()
    await world.close()


@virtual_time
async def test_an_old_path_that_dies_in_the_middle_ends_the_link_on_both_sides() -> None:
    world = World(delay_s=1.0)
    link = await world.start()
    await link.send(CloseSession(bytes(16)))
    moving = asyncio.create_task(world.upgrade())
    await asyncio.sleep(2.2)
    world.transport.dialled[0].abort()
    await moving
    await asyncio.sleep(PoolPolicy().path_switch_timeout_s + 5)
    assert sorted(peer for peer, _ in world.lost)[-1] == "node"
    with pytest.raises(ConnectionLost):
        await link.send(Ping(1))
    assert (len(world.client), len(world.node)) == (0, 0)
    await world.close()


@virtual_time
async def test_invalid_path_switches() -> None:
    """Half a path switch, one twice, a reply to none: each ends that connection and is a violation of its peer."""
    world = World(delay_s=0.001)
    await world.start()

    async def sends(*messages: AnyMessage) -> None:
        connection = await world.transport.dial("node")
        for message in messages:
            await connection.send(message)
        with pytest.raises(ConnectionLost):
            await drain(connection)

    await sends(PathSwitch(1))
    await sends(Ping(1), PathSwitch(2))
    assert world.node.violations.counts == {"client": 2}
    async with asyncio.TaskGroup() as group:
        group.create_task(sends(PathSwitch(3)))
        group.create_task(sends(PathSwitch(3)))
    assert world.node.violations.counts == {"client": 4}
    assert not world.node._path_switches._pending
    await world.close()
