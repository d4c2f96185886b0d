"""What `status`, `top` and `doctor` see of a swarm whose key in the DHT an attacker has taken over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable

import pytest
from gossip_peers import GossipPeer, Swallowed
from record_makers import LAYERS, MODEL, identity, record_at
from test_net_gossip import Village, address_of, village
from virtual_clock import virtual_time, wall_clock

from swarm.config import NodeConfig
from swarm.gossip_messages import RecordsQuery
from swarm.messages import CloseSession
from swarm.net.dht.directory import DhtDirectory
from swarm.net.gossip import record_reader
from swarm.net.libp2p.options import HostOptions
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.types import PeerId
from swarm_node.commands import doctor, status, top
from swarm_node.network import swarm_reader

HERE = "/ip4/127.0.0.1/tcp/0"


def hostile(count: int, at: float, layers: int) -> dict[PeerId, bytes]:
    return {identity(n).peer: record_at(n, at, layers=layers) for n in range(500, 500 + count)}


@contextlib.asynccontextmanager
async def looking(made: Village, directory: Swallowed, *named: int) -> AsyncIterator[record_reader.RecordReader]:
    transport = made.network.transport(identity(60).peer)
    try:
        async with swarm_reader.merged(MODEL, [address_of(n) for n in named], transport, directory) as reader:
            reader._wall_clock = wall_clock  # of the virtual time
            yield reader
    finally:
        await transport.close()


@pytest.mark.parametrize("layers", [LAYERS, LAYERS + 1])
@virtual_time
async def test_a_directory_that_shows_an_attackers_records_alone(layers: int) -> None:
    async with village() as made:
        await made.node(1)
        for number in (2, 3, 4):
            await made.node(number, 1)
        await asyncio.sleep(6.0)
        honest = {identity(number).peer for number in (1, 2, 3, 4)}
        async with looking(made, Swallowed(hostile(160, wall_clock(), layers)), 2) as reader:
            snapshot = await reader.snapshot()
            shown = {node.peer for node in snapshot.nodes}
            assert honest <= shown
            assert snapshot.num_layers == LAYERS
            if layers != LAYERS:
                assert shown == honest
                assert snapshot.rejected_records == {"wrong_depth": 160}


@virtual_time
async def test_a_directory_that_fails_and_one_where_nobody_serves_the_model() -> None:
    async with village() as made:
        await made.node(1)
        await made.node(2, 1)
        async with looking(made, Swallowed(broken=True), 1) as reader:
            assert {node.peer for node in (await reader.snapshot()).nodes} >= {identity(1).peer}
        await made.node(3, is_node=False)
        async with looking(made, Swallowed(), 9) as reader:  # nobody is at that address
            began = asyncio.get_running_loop().time()
            snapshot = await reader.snapshot()
            assert (snapshot.nodes, snapshot.num_layers) == ((), 0)
            assert asyncio.get_running_loop().time() - began <= 1.5


@virtual_time
async def test_who_answers_with_something_else_than_records_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with village() as made:
        one, two = await made.node(1), await made.node(2)

        def instead(link: MigratableLink, query: RecordsQuery, body: memoryview) -> None:
            one.tasks.start(link.send(CloseSession(bytes(16))), "no records")

        monkeypatch.setattr(one.answers, "on_query", instead)
        async with looking(made, Swallowed(), 1, 2) as reader:
            assert {node.peer for node in (await reader.snapshot()).nodes} == {two.peer}
            assert reader._pool.dialled == (two.peer,)
            assert reader._pool.violations.counts == {one.peer: 1}


# Over real libp2p hosts, with a real DHT ----------------------------------------------------------------------------


async def _node(number: int, first: GossipPeer | None, stack: contextlib.AsyncExitStack) -> GossipPeer:
    """A node that keeps its part of the DHT, where nothing of its own is stored."""
    peers = first.transport.addresses[:1] if first is not None else ()
    transport = await Libp2pTransport.start(identity(number), HostOptions((HERE,), peers=peers))
    directory = await DhtDirectory.start(transport, peers)
    node = GossipPeer(identity(number), transport, time.time, bootstrap=peers)
    stack.push_async_callback(node.close)
    stack.push_async_callback(directory.close)
    await node.serve()
    return node


async def _live(node: GossipPeer) -> None:
    while True:
        node.publish()
        await node.reader.snapshot()
        await asyncio.sleep(1.0)


async def _attack(first: GossipPeer, number: int, stack: contextlib.AsyncExitStack) -> Callable[[], object]:
    """An identity whose record, of another depth, is all that the DHT has. -> publish it again."""
    peers = first.transport.addresses[:1]
    transport = await Libp2pTransport.start(identity(number), HostOptions((HERE,), peers=peers))
    stack.push_async_callback(transport.close)
    directory = await DhtDirectory.start(transport, peers)
    stack.push_async_callback(directory.close)

    async def publish() -> None:
        now = time.time()
        await directory.publish(record_at(number, now, layers=LAYERS + 1), MODEL, now + 12.0)

    return publish


@pytest.mark.processes
async def test_status_top_and_doctor_over_a_dht_that_has_only_hostile_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        nodes: list[GossipPeer] = []
        for number in (1, 2):
            nodes.append(await _node(number, nodes[0] if nodes else None, stack))
        publish = [await _attack(nodes[0], number, stack) for number in (500, 501)]
        async with asyncio.TaskGroup() as living:
            tasks = [living.create_task(_live(node)) for node in nodes]
            try:
                async with asyncio.timeout(30.0):
                    while not all([len(await node.seen()) == 2 for node in nodes]):  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                await asyncio.gather(*(one() for one in publish))  # type: ignore[misc,call-overload]
                peers = nodes[1].transport.addresses[:1]
                honest = {node.peer for node in nodes}

                await status.show(peers, MODEL, True)
                shown = json.loads(capsys.readouterr().out)
                assert {node["peer"] for node in shown["nodes"]} == honest
                assert (shown["num_layers"], shown["ignored"]) == (LAYERS, {"wrong_depth": 2})
                await status.show(peers, MODEL, False)
                assert "2 records ignored: wrong_depth" in (text := capsys.readouterr().out)
                assert "so say 1 of 1 peers that were named to join by" in text.replace("\n", " ")
                await top.show(peers, MODEL, asyncio.Event(), as_json=True)
                assert {node["peer"] for node in json.loads(capsys.readouterr().out)["nodes"]} == honest
                config = NodeConfig(listen=(HERE,), peers=peers, model=MODEL)
                async with contextlib.AsyncExitStack() as checks:
                    transport = await doctor._open(config, checks)
                    found = [finding async for finding in doctor._others(config, transport, checks)]
                assert found[-1].sentence == f"answers: 2 nodes of {MODEL}, 2 of which only other nodes told us of"
            finally:
                for task in tasks:
                    task.cancel()
