"""Records passed on between peers, in virtual time: who sees whom without a directory, and hostile peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from gossip_peers import GossipPeer, Swallowed
from record_makers import LAYERS, MODEL, forged, goodbye_at, identity, record_at
from virtual_clock import virtual_time, wall_clock

from swarm.errors import ConnectionLost, NetworkError
from swarm.gossip_messages import MAX_RECORDS, Records, RecordsQuery
from swarm.net.base.transport import Connection
from swarm.net.gossip.policy import AnswerPolicy
from swarm.testing.memory_network import LinkModel, MemoryConnection, MemoryNetwork
from swarm.types import PeerId


def address_of(number: int) -> str:
    return f"/memory/{identity(number).peer}/p2p/{identity(number).peer}"


class Village:
    """Peers on one network in memory. `node(1, 2)`: number 1, which was given the address of number 2."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(link=LinkModel(delay_s=0.02), clock=wall_clock)
        self.peers: list[GossipPeer] = []
        self._publishing: list[asyncio.Task[None]] = []

    async def node(self, number: int, *bootstrap: int, is_node: bool = True, **options: object) -> GossipPeer:
        one = identity(number)
        peer = GossipPeer(
            one,
            self.network.transport(one.peer),
            wall_clock,
            bootstrap=[address_of(other) for other in bootstrap],
            is_node=is_node,
            **options,  # type: ignore[arg-type]
        )
        self.peers.append(peer)
        if is_node:
            await peer.serve()
            peer.publish()
            self._publishing.append(asyncio.create_task(_live(peer)))
        return peer

    async def close(self) -> None:
        for task in self._publishing:
            task.cancel()
        for peer in self.peers:
            await peer.close()


async def _live(peer: GossipPeer) -> None:
    """What a node does every second and a half: publish, and look around."""
    while True:
        await asyncio.sleep(1.5)
        peer.publish()
        await peer.reader.snapshot()


@asynccontextmanager
async def village() -> AsyncIterator[Village]:
    made = Village()
    try:
        yield made
    finally:
        await made.close()


def peers(*numbers: int) -> set[PeerId]:
    return {identity(number).peer for number in numbers}


async def within(seconds: float, seen: Callable[[], Awaitable[set[PeerId]]], wanted: set[PeerId]) -> None:
    async with asyncio.timeout(seconds):
        while not wanted <= await seen():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("broken", [False, True])
@virtual_time
async def test_two_that_know_one_neighbor_see_each_other_without_a_directory(broken: bool) -> None:
    async with village() as made:
        await made.node(1)
        two = await made.node(2, 1, directory=Swallowed(broken=broken))
        three = await made.node(3, 1, directory=Swallowed(broken=broken))
        for reader in (two, three):
            await within(6.0, reader.seen, peers(1, 2, 3))
        for _ in range(40):  # and go on to, for much longer than a record lives
            await asyncio.sleep(1.0)
            for reader in made.peers:
                assert peers(1, 2, 3) <= await reader.seen()


@virtual_time
async def test_a_fresh_client_sees_everybody_at_its_first_look() -> None:
    async with village() as made:
        await made.node(1)
        for number in range(2, 7):
            await made.node(number, 1)
        await asyncio.sleep(8.0)
        junk = {identity(number).peer: b"junk" for number in range(100, 300)}
        client = await made.node(50, 4, is_node=False, directory=Swallowed(junk))
        before = wall_clock()
        assert await client.seen() == peers(1, 2, 3, 4, 5, 6)
        assert wall_clock() - before < 1.0


@virtual_time
async def test_a_node_that_leaves_is_not_brought_back_by_anybody() -> None:
    async with village() as made:
        one, two, three = await made.node(1), await made.node(2, 1), await made.node(3, 1)
        await within(6.0, three.seen, peers(1, 2, 3))
        await within(6.0, two.seen, peers(1, 2, 3))
        made._publishing[1].cancel()
        two.book.keep_own(goodbye_at(2, wall_clock()), wall_clock())
        await two.reader.tell(0.5)
        await asyncio.sleep(0.2)
        stale = record_at(2, wall_clock() - 2.0)
        await two.close()
        for _ in range(60):
            three.book.offer(stale, one.peer)  # replayed again and again
            assert identity(2).peer not in await three.seen()
            assert identity(2).peer not in await one.seen()
            await asyncio.sleep(0.25)


class Hostile:
    """A peer that accepts connections and answers as the test says."""

    def __init__(self, made: Village, number: int) -> None:
        self.transport = made.network.transport(identity(number).peer)
        self.answer: Callable[[RecordsQuery], list[Records]] = lambda query: []
        self.asked = 0

    async def serve(self) -> None:
        await self.transport.serve(self._run)

    async def _run(self, connection: Connection) -> None:
        try:
            while True:
                message, _ = await connection.receive()
                if isinstance(message, RecordsQuery):
                    self.asked += 1
                    for answer in self.answer(message):
                        await connection.send(answer)
        except NetworkError:
            return


@virtual_time
async def test_peers_that_never_answer_delay_a_first_look_by_a_second() -> None:
    async with village() as made:
        hostile = Hostile(made, 9)
        await hostile.serve()
        client = await made.node(50, 9, is_node=False)
        before = wall_clock()
        assert await client.seen() == set()
        assert wall_clock() - before <= 1.01
        for _ in range(20):
            await client.seen()
            await asyncio.sleep(0.5)
        assert hostile.asked <= 2  # one that gave no answer is left alone for a while
        await hostile.transport.close()


@pytest.mark.parametrize("kind", ["forged", "of another model", "junk"])
@virtual_time
async def test_who_passes_on_a_forged_record_is_cut_off(kind: str) -> None:
    async with village() as made:
        hostile = Hostile(made, 9)
        bad = {
            "forged": forged(record_at(2, wall_clock())),
            "of another model": record_at(2, wall_clock(), model="other"),
            "junk": b"junk",
        }[kind]
        hostile.answer = lambda query: [Records(query.nonce, [bad])]
        await hostile.serve()
        client = await made.node(50, 9, is_node=False)
        assert await client.seen() == set()
        await asyncio.sleep(0.1)
        assert client.pool.violations.counts == {identity(9).peer: 1}
        assert len(client.pool) == 0
        await hostile.transport.close()


@pytest.mark.parametrize("twice", [False, True])
@virtual_time
async def test_answers_that_nobody_asked_for_break_the_protocol(twice: bool) -> None:
    async with village() as made:
        hostile = Hostile(made, 9)
        hostile.answer = lambda query: (
            [Records(query.nonce), Records(query.nonce)] if twice else [Records(query.nonce + 1)]
        )
        await hostile.serve()
        client = await made.node(50, 9, is_node=False)
        await client.seen()
        await asyncio.sleep(0.5)
        assert client.pool.violations.counts == {identity(9).peer: 1}
        await hostile.transport.close()


@virtual_time
async def test_a_late_answer_is_no_violation() -> None:
    async with village() as made:
        hostile = Hostile(made, 9)
        made.network.set_link(identity(9).peer, identity(50).peer, LinkModel(delay_s=3.0))
        hostile.answer = lambda query: [Records(query.nonce, [record_at(2, wall_clock())])]
        await hostile.serve()
        client = await made.node(50, 9, is_node=False)
        await client.seen()
        await asyncio.sleep(10.0)
        assert client.pool.violations.counts == {}
        await hostile.transport.close()


async def _connected(made: Village, number: int, to: int) -> MemoryConnection:
    return await made.network.transport(identity(number).peer).dial(identity(to).peer)


async def _answers(connection: MemoryConnection, seconds: float) -> list[Records]:
    answers: list[Records] = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                message, _ = await connection.receive()
                if isinstance(message, Records):
                    answers.append(message)
    except (TimeoutError, ConnectionLost):
        return answers


@virtual_time
async def test_a_flood_of_questions_is_answered_in_part_and_then_refused() -> None:
    async with village() as made:
        one = await made.node(1)
        flooder = await _connected(made, 9, 1)
        for nonce in range(20):
            await flooder.send(RecordsQuery(nonce, MODEL))
        answers = await _answers(flooder, 1.0)
        assert 1 <= len(answers) <= AnswerPolicy().per_peer_burst
        for nonce in range(100):
            try:
                await flooder.send(RecordsQuery(nonce, MODEL))
            except ConnectionLost:
                break
        await asyncio.sleep(0.1)
        assert one.pool.violations.counts[identity(9).peer] >= 1
        honest = await _connected(made, 10, 1)
        await honest.send(RecordsQuery(1, MODEL))
        assert len((await _answers(honest, 1.0))[0].records) == 1


@virtual_time
async def test_answers_to_all_strangers_together_have_a_limit_that_those_known_do_not_feel() -> None:
    async with village() as made:
        one = await made.node(1, answer_policy=AnswerPolicy(bytes_per_s=4000.0))
        two = await made.node(2, 1)
        await within(6.0, two.seen, peers(1, 2))
        for number in range(100, 140):
            stranger = await _connected(made, number, 1)
            await stranger.send(RecordsQuery(1, MODEL))
        await asyncio.sleep(0.2)
        assert one.book.record_of(two.peer) is not None
        for _ in range(20):
            assert await two.seen() == peers(1, 2)
            await asyncio.sleep(1.0)


@virtual_time
async def test_questions_that_are_no_questions_break_the_protocol() -> None:
    async with village() as made:
        one = await made.node(1)
        now = wall_clock()
        for number, (query, body) in enumerate(
            [
                (RecordsQuery(1, MODEL, slice=3, slices=2), b""),
                (RecordsQuery(1, MODEL, own=record_at(2, now)), b""),
                (RecordsQuery(1, MODEL, own=b"junk"), b""),
                (RecordsQuery(1, MODEL), b"body"),
            ],
            start=20,
        ):
            hostile = await _connected(made, number, 1)
            await hostile.send(query, body)
            assert await _answers(hostile, 1.0) == []
            assert one.pool.violations.counts[identity(number).peer] == 1
        forger = await _connected(made, 30, 1)
        await forger.send(RecordsQuery(1, MODEL, own=forged(record_at(30, now))))
        await asyncio.sleep(1.0)
        assert one.pool.violations.counts[identity(30).peer] == 1
        other = await _connected(made, 31, 1)
        await other.send(RecordsQuery(1, "another model"))
        assert (await _answers(other, 1.0))[0].records == []
        assert one.book.record_of(identity(2).peer) is None


@virtual_time
async def test_a_neighbor_that_names_only_its_own_identities_does_not_hide_the_others() -> None:
    async with village() as made:
        await made.node(1)
        two = await made.node(2, 1)
        await within(6.0, two.seen, peers(1, 2))
        hostile = Hostile(made, 9)
        identities = iter(range(1000, 3000))
        hostile.answer = lambda query: [
            Records(query.nonce, [record_at(next(identities, 2999), wall_clock()) for _ in range(MAX_RECORDS)])
        ]
        await hostile.serve()
        client = await made.node(50, 1, 9, is_node=False)
        await client.pool.get(identity(9).peer)
        for _ in range(40):
            assert peers(1, 2) <= await client.seen()
            await asyncio.sleep(0.5)
        assert peers(1, 2) <= await two.seen()
        assert (await client.reader.snapshot()).num_layers == LAYERS
        await hostile.transport.close()
