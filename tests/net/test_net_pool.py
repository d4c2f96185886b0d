"""The connection pool over the in-process network, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from virtual_clock import run, virtual_time

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable, ProtocolError
from swarm.messages import AnyMessage, CloseSession, DropInFlight, Ping, Pong, SessionOpened
from swarm.net.base.transport import Connection
from swarm.net.pool.connection_pool import ConnectionPool, PoolPolicy
from swarm.testing.memory_network import LinkModel, MemoryNetwork, MemoryTransport

SESSION = bytes(16)


class Peer:
    """A pool that notes what happens to it and answers every Close with Opened."""

    def __init__(self, network: MemoryNetwork, name: str, limits: Limits | None = None) -> None:
        self.transport: MemoryTransport = network.transport(name)
        self.frames: asyncio.Queue[tuple[str, AnyMessage, bytes]] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[Connection, NetworkError]] = asyncio.Queue()
        self.pool = ConnectionPool(self.transport, self.on_frame, self.on_lost, limits)

    async def on_frame(self, connection: Connection, message: AnyMessage, body: Buffer) -> None:
        if isinstance(message, DropInFlight):
            raise ProtocolError("no prunes here")
        if isinstance(message, CloseSession):
            await connection.send(SessionOpened(message.session))
        self.frames.put_nowait((connection.peer, message, bytes(body)))

    async def on_lost(self, connection: Connection, error: NetworkError) -> None:
        self.lost.put_nowait((connection, error))

    async def close(self) -> None:
        await self.pool.close()
        await self.transport.close()


async def two(
    link: LinkModel | None = None, limits: Limits | None = None, window: int = 1 << 20
) -> tuple[MemoryNetwork, Peer, Peer]:
    network = MemoryNetwork(link=link, window=window)
    client, node = Peer(network, "client"), Peer(network, "node", limits)
    await node.pool.serve()
    return network, client, node


@virtual_time
async def test_sessions_share_one_connection_dialled_once() -> None:
    _network, client, node = await two(LinkModel(delay_s=0.1))
    connections = await asyncio.gather(*(client.pool.get("node", ()) for _ in range(20)))
    assert len(set(connections)) == 1
    assert await client.pool.get("node") is connections[0]
    assert len(client.pool) == 1
    await connections[0].send(CloseSession(SESSION), b"body")
    assert await node.frames.get() == ("client", CloseSession(SESSION), b"body")
    assert await client.frames.get() == ("node", SessionOpened(SESSION), b"")
    assert len(node.pool) == 1
    await client.close()
    await node.close()


@virtual_time
async def test_one_impatient_caller_does_not_spoil_the_dial_for_others() -> None:
    _, client, node = await two(LinkModel(delay_s=0.1))
    impatient = asyncio.create_task(client.pool.get("node"))
    patient = asyncio.create_task(client.pool.get("node"))
    await asyncio.sleep(0.01)
    impatient.cancel()
    assert (await patient).peer == "node"
    await client.close()
    await node.close()


@virtual_time
async def test_a_callers_deadline_is_its_own() -> None:
    network, client, _ = await two(limits=Limits(dial_timeout_s=10.0))
    network.partition("client", "node")
    patient = asyncio.create_task(client.pool.get("node"))
    with pytest.raises(PeerUnreachable, match="3 s"):
        await client.pool.get("node", timeout_s=3.0)
    assert asyncio.get_running_loop().time() == 3.0
    with pytest.raises(PeerUnreachable, match="10 s"):
        await patient
    assert asyncio.get_running_loop().time() == 10.0


@virtual_time
async def test_unreachable_peers() -> None:
    network, client, _ = await two()
    with pytest.raises(PeerUnreachable):
        await client.pool.get("nobody")
    network.partition("client", "node")
    with pytest.raises(PeerUnreachable, match="10 s"):
        await client.pool.get("node")
    network.heal("client", "node")
    assert (await client.pool.get("node")).peer == "node"


@virtual_time
async def test_a_lost_connection_is_reported_once_and_redialled() -> None:
    network, client, node = await two()
    first = await client.pool.get("node")
    network.kill("node")
    connection, error = await client.lost.get()
    assert connection is first
    assert isinstance(error, ConnectionLost)
    assert len(client.pool) == 0
    with pytest.raises(PeerUnreachable):
        await client.pool.get("node")
    reborn = Peer(network, "node")
    await reborn.pool.serve()
    second = await client.pool.get("node")
    assert second is not first
    assert client.lost.empty()
    await node.close()
    await second.send(CloseSession(SESSION))
    assert (await reborn.frames.get())[1] == CloseSession(SESSION)


@virtual_time
async def test_rtt() -> None:
    network, client, node = await two(LinkModel(delay_s=0.02))
    assert await client.pool.rtt("node") == pytest.approx(40.0)
    assert node.frames.empty(), "pings are the pool's own business"
    network.partition("client", "node")
    with pytest.raises(PeerUnreachable, match="2 s"):
        await client.pool.rtt("node", timeout_s=2.0)
    waiting = asyncio.create_task(client.pool.rtt("node"))
    await asyncio.sleep(0.1)
    await client.pool.drop("node")
    with pytest.raises(ConnectionLost):
        await waiting


@virtual_time
async def test_violators_are_disconnected_and_then_refused() -> None:
    network, client, node = await two(limits=Limits(max_protocol_errors=3))
    bystander = Peer(network, "bystander")
    await (await bystander.pool.get("node")).send(CloseSession(SESSION))
    for count in range(1, 4):
        connection = await client.pool.get("node")
        await connection.send(DropInFlight(SESSION, 0))
        await client.lost.get()
        lost, error = await node.lost.get()
        assert lost.peer == "client"
        assert isinstance(error, ProtocolError)
        assert node.pool.violations.counts == {"client": count}
    assert node.pool.violations.refuses("client")
    with pytest.raises(PeerUnreachable, match="refused"):
        await node.pool.get("client")
    await client.pool.get("node")
    await client.lost.get()
    assert await bystander.pool.rtt("node") == 0.0


@virtual_time
async def test_a_violation_that_a_service_reports_later_is_recorded() -> None:
    _, client, node = await two()
    await client.pool.rtt("node")
    (accepted,) = node.pool._links
    await node.pool.reject(accepted, ProtocolError("a body of the wrong size"))
    await node.pool.reject(accepted, ProtocolError("twice is once"))
    _, error = await node.lost.get()
    assert "wrong size" in str(error)
    assert node.pool.violations.counts == {"client": 1}


@virtual_time
async def test_connections_are_bounded() -> None:
    network, _client, node = await two(limits=Limits(max_connections=6))
    greedy = network.transport("greedy")
    opened = []
    for _ in range(PoolPolicy().max_accepted_per_peer + 1):
        opened.append(await greedy.dial("node"))
        await asyncio.sleep(0.1)
    with pytest.raises(ConnectionLost):
        await opened[-1].receive()
    for i in range(3):
        connection = await network.transport(f"p{i}").dial("node")
        await connection.send(Ping(1))
        assert (await connection.receive())[0] == Pong(1), "a newcomer gets in"
    assert len(node.pool) == 6
    with pytest.raises(ConnectionLost):
        await opened[0].receive()
    await Peer(network, "another").pool.serve()
    await node.pool.get("another")  # the oldest of the block that has most makes way again
    assert len(node.pool) == 6
    with pytest.raises(ConnectionLost):
        await opened[1].receive()


@virtual_time
async def test_a_flood_of_pings_is_cut_off() -> None:
    network, _, node = await two(window=1000)
    hostile = await network.transport("hostile").dial("node")
    for i in range(2000):
        try:
            await hostile.send(Ping(i))  # and the answers are never read
        except ConnectionLost:
            break
    else:
        pytest.fail("a peer may flood us without end")
    assert node.pool.violations.counts == {"hostile": 1}


@virtual_time
async def test_an_unresponsive_connection_ends_but_an_idle_one_does_not() -> None:
    network, client, node = await two()
    await client.pool.get("node")
    await asyncio.sleep(600)
    assert client.lost.empty()
    assert node.lost.empty()
    network.kill("node", silent=True)
    start = asyncio.get_running_loop().time()
    _, error = await client.lost.get()
    assert "nothing came" in str(error)
    assert asyncio.get_running_loop().time() - start <= 30
    assert len(client.pool) == 0


@virtual_time
async def test_unexpected_pongs_are_ignored() -> None:
    _, client, _node = await two()
    await (await client.pool.get("node")).send(Pong(12345))
    assert await client.pool.rtt("node") == 0.0


@virtual_time
async def test_close_ends_everything_quietly() -> None:
    network, client, node = await two(LinkModel(delay_s=1.0))
    network.set_link("client", "slow", LinkModel(delay_s=100.0))
    await network.transport("slow").serve(node.pool._accept)
    await client.pool.get("node")
    dialling = asyncio.create_task(client.pool.get("slow"))
    await asyncio.sleep(0.1)
    async with client.pool:
        pass
    with pytest.raises(PeerUnreachable):
        await dialling
    with pytest.raises(PeerUnreachable):
        await client.pool.get("node")
    assert client.lost.empty()
    assert len(client.pool) == 0
    await node.lost.get()  # the other side does learn of it
    await client.pool.close()


def test_a_bug_in_a_handler_costs_one_connection_and_is_reported() -> None:
    survived: list[float] = []

    async def main() -> None:
        network = MemoryNetwork()

        async def on_frame(connection: Connection, message: AnyMessage, body: Buffer) -> None:
            raise ZeroDivisionError("a bug")

        lost: asyncio.Queue[NetworkError] = asyncio.Queue()

        async def on_lost(connection: Connection, error: NetworkError) -> None:
            lost.put_nowait(error)

        node = ConnectionPool(network.transport("node"), on_frame, on_lost)
        await node.serve()
        client, other = Peer(network, "client"), Peer(network, "other")
        await (await client.pool.get("node")).send(CloseSession(SESSION))
        await client.lost.get()
        assert isinstance(await lost.get(), ConnectionLost)
        survived.append(await other.pool.rtt("node"))

    with pytest.raises(ZeroDivisionError):
        run(main())
    assert survived == [0.0]
