"""Who may start handshakes, who makes way, how fast frames are read: as rules, and over a network in memory."""

from __future__ import annotations

import asyncio
import contextlib
import typing

import msgspec
import pytest
from virtual_clock import virtual_time

from swarm import codec
from swarm.codec import UndecodableFrame
from swarm.config import Limits
from swarm.errors import ConnectionLost, ProtocolError
from swarm.messages import (
    MAX_HISTORY,
    AnyMessage,
    CloseSession,
    OpenSession,
    Ping,
    Pong,
    ProgressQuery,
    Step,
    StepResult,
    WireLogprobs,
    WireSampling,
)
from swarm.net.base.half_open import HalfOpen, HandshakePolicy
from swarm.net.base.transport import Connection
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.eviction import NO_ROOM, EvictionPolicy, LinkFacts, LinkUse, victim
from swarm.net.pool.frame_budgets import FrameBudgetPolicy, FrameBudgets, price
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import Grammar, GrammarKind

SESSION = bytes(16)


# Handshakes ----------------------------------------------------------------------------------------------------------


def test_unfinished_handshakes_are_bounded_and_the_oldest_of_the_block_makes_way() -> None:
    half_open: HalfOpen[int] = HalfOpen(HandshakePolicy(max_half_open=10, max_half_open_per_block=3))
    dropped = [half_open.admit(number, "attacker", 0.0) for number in range(10)]
    assert dropped == [[], [], [], [0], [1], [2], [3], [4], [5], [6]]
    assert half_open.admit(100, "honest", 0.0) == []
    half_open.done(100)
    half_open.done(100)
    assert len(half_open) == 3


def test_handshakes_of_many_blocks_are_bounded_together() -> None:
    half_open: HalfOpen[int] = HalfOpen(HandshakePolicy(max_half_open=10, max_half_open_per_block=3))
    for number in range(10):
        assert half_open.admit(number, f"block {number // 2}", 0.0) == []
    assert half_open.admit(10, "honest", 0.0) == [0], "of the first of the blocks that have most"
    assert len(half_open) == 10


def test_a_flood_of_one_block_leaves_handshakes_to_the_others() -> None:
    policy = HandshakePolicy()
    half_open: HalfOpen[int] = HalfOpen(policy)
    admitted = 0
    for number in range(10_000):  # 1,000 a second for 10 s
        admitted += half_open.admit(number, "attacker", number / 1000) is not None
        half_open.done(number)
    assert admitted <= policy.block_burst + 10 * policy.block_per_s + 1
    assert half_open.refused == 10_000 - admitted
    assert half_open.admit(-1, "honest", 10.0) is not None


# Eviction ------------------------------------------------------------------------------------------------------------


def facts(*rows: tuple[str, LinkUse, float]) -> list[LinkFacts[int]]:
    return [LinkFacts(number, block, use, since) for number, (block, use, since) in enumerate(rows)]


S, F, D, U = LinkUse.STRANGER, LinkUse.FORMER, LinkUse.DIALED, LinkUse.IN_USE


@pytest.mark.parametrize(
    ("links", "newcomer", "expected"),
    [
        (facts(("a", S, 1)), "a", None),
        (facts(("a", S, 3), ("a", S, 1), ("a", U, 0), ("b", S, 0)), "a", 1),  # the block's own oldest stranger
        (facts(("a", S, 3), ("a", F, 1), ("b", S, 0)), "a", 0),  # who has used this node stays longer
        (facts(("a", F, 3), ("a", F, 1)), "a", 1),
        (facts(("a", S, 3), ("b", S, 2), ("b", S, 5), ("c", S, 1)), "d", 1),  # all strangers: the largest block's
        (facts(("a", U, 3), ("b", U, 2), ("c", D, 5), ("c", D, 4), ("a", F, 9)), "d", 4),
        (facts(("a", U, 3), ("b", U, 2), ("c", D, 5), ("c", D, 4), ("a", U, 9)), "d", 3),
        (facts(*[("a", U, 1.0)] * 5), "d", NO_ROOM),  # nobody whose session runs makes way
        (facts(("a", S, 1), ("a", S, 2)), None, None),  # we dial, or a session needs it: shares do not count
        (facts(*[("a", U, 1.0)] * 4, ("b", S, 1)), None, 4),
    ],
)
def test_who_makes_way(links: list[LinkFacts[int]], newcomer: str | None, expected: object) -> None:
    assert victim(links, newcomer, 5, EvictionPolicy(max_idle=4, max_idle_per_block=2)) == expected


def test_somebody_with_all_connections_pushes_out_only_his_own() -> None:
    """300 connections of one block arrive while 20 honest newcomers of others come and 10 clients have sessions."""
    links: dict[int, LinkFacts[int]] = {n: LinkFacts(n, f"client {n}", U, 0.0) for n in range(10)}
    newcomers = {100 + n: f"newcomer {n}" for n in range(20)}
    for number in range(1000, 1300):
        block = "attacker" if number % 15 else newcomers[100 + (number - 1000) // 15]
        link = number if block == "attacker" else 100 + (number - 1000) // 15
        chosen = victim(list(links.values()), block, 64)
        if isinstance(chosen, int):
            del links[chosen]
        assert chosen is not NO_ROOM
        links[link] = LinkFacts(link, block, S, float(number))
    assert set(range(10)) <= links.keys()
    assert newcomers.keys() - {100} <= links.keys()
    assert len(links) <= 64


# Headers -------------------------------------------------------------------------------------------------------------


def test_a_header_that_is_too_long_for_its_kind_is_not_decoded() -> None:
    for kind in typing.get_args(AnyMessage):
        tag = kind.__struct_config__.tag
        header = msgspec.msgpack.encode([tag, "x" * kind.max_header])
        with pytest.raises(UndecodableFrame, match="bytes of kind") as refused:
            codec.decode(header)
        assert refused.value.size == 0, "it has cost nothing"
        assert kind.max_header <= codec.DEFAULT_LIMITS.header
    for junk in (b"", b"\x91", b"\xdc", b"\xdc\x00\x01", b"\x90", b"\x92\xc1", b"\x91\xa9ab", b"\x91\xa2\xff\xff"):
        with pytest.raises(ProtocolError):
            codec.decode(junk)


def test_the_longest_honest_headers_are_within_their_bounds() -> None:
    token, logprobs = (1 << 31) - 1, WireLogprobs((1 << 31) - 1, [(1 << 31) - 1] * 20, [(1 << 31) - 1] * 20)
    grammar = Grammar(GrammarKind.REGEX, "\u20ac" * (64 << 10))
    sampling = WireSampling(logit_bias=[(token, 0.123)] * 1024, grammar=grammar)
    rows = [token] * 1024
    messages: list[AnyMessage] = [
        OpenSession(
            SESSION, "m" * 1024, "h", "bf16", 0, 1, 9, history=[token] * MAX_HISTORY, sampling=sampling,
            block_hashes=[bytes(8)] * 4096, kv_key=bytes(16), kv_source_token=bytes(16), kv_source="p" * 128,
        ),
        Step(
            SESSION, 1 << 53, 1 << 53, 1 << 20, 0, tokens=rows, parents=[4095] * 1024, slots=[4095] * 1024,
            commit_slots=[4095] * 4096, trace=[(0.1, 0.1)] * 256,
        ),
        StepResult(SESSION, 0, 0, rows, logprobs=[logprobs] * 1024, prompt_logprobs=[logprobs] * 1024),
        CloseSession(SESSION, [bytes(8)] * 4096),
    ]  # fmt: skip
    for message in messages:
        assert codec.decode(codec.encode(message)[0][codec.PREFIX.size :]) == message


# Frames --------------------------------------------------------------------------------------------------------------


def test_prices_follow_the_size() -> None:
    small = OpenSession(SESSION, "m", "h", "bf16", 0, 1, 9)
    large = msgspec.structs.replace(small, history=[1] * MAX_HISTORY)
    assert price(Ping(1)) == 1.0
    assert price(large) - price(small) == pytest.approx(MAX_HISTORY / 600)
    assert price(Step(SESSION, 0, 0, 0, 1, tokens=[1])) < price(Step(SESSION, 0, 0, 0, 1024, tokens=[1] * 1024))


def test_a_debt_is_its_blocks_and_steps_are_their_peers_alone() -> None:
    now = 0.0
    budgets = FrameBudgets(lambda: now, FrameBudgetPolicy())
    for number in range(1000):  # identities of one block
        budgets.charge(f"peer {number}", "block", True, OpenSession(SESSION, "m", "h", "bf16", 0, 1, 9))
    assert budgets.wait_s("newcomer", "block", True) == pytest.approx((10_000 - 1200) / 400)
    assert budgets.wait_s("newcomer", "elsewhere", True) == pytest.approx((10_000 - 6000) / 2000)
    assert budgets.wait_s("client", "block", False) == 0.0, "who has a session is not held up by strangers"
    budgets.charge("client", "block", False, Ping(1))
    assert budgets.wait_s("client", "block", False) == 0.0
    for _ in range(20_000):
        budgets.charge("hop", "block", False, Step(SESSION, 0, 0, 0, 1))
    assert budgets.wait_s("hop", "block", False) > 1.0
    assert budgets.wait_s("client", "block", False) == 0.0
    now = 60.0
    assert budgets.wait_s("hop", "block", False) == 0.0


class _Node:
    """A pool that counts what it reads."""

    def __init__(self, network: MemoryNetwork, users: set[str], limits: Limits | None = None) -> None:
        self.frames = 0
        self.pool = ConnectionPool(
            network.transport("node"), self.on_frame, limits=limits, uses=lambda peer: peer in users
        )

    async def on_frame(self, connection: Connection, message: AnyMessage, body: memoryview) -> None:
        self.frames += 1


async def _flood(connection: Connection, message: AnyMessage) -> None:
    with contextlib.suppress(ConnectionLost):
        while True:
            await connection.send(message)


@virtual_time
async def test_a_flood_of_queries_is_read_slowly_and_a_client_with_a_session_is_not_held_up() -> None:
    network = MemoryNetwork(link=LinkModel(0.001), window=4000)
    network.hosts = {"honest": "192.0.2.1"} | {f"hostile {i}": "192.0.2.1" for i in range(8)}
    node = _Node(network, {"honest"})
    await node.pool.serve()
    policy = FrameBudgetPolicy()
    async with asyncio.TaskGroup() as group:
        connections = [await network.transport(f"hostile {i}").dial("node") for i in range(8)]
        floods = [group.create_task(_flood(connection, ProgressQuery(SESSION))) for connection in connections]
        await asyncio.sleep(20)
        seen = node.frames
        honest = await network.transport("honest").dial("node")
        for number in range(20):
            started = asyncio.get_running_loop().time()
            await honest.send(Ping(number))
            assert (await honest.receive())[0] == Pong(number)
            assert asyncio.get_running_loop().time() - started < 0.01
            await asyncio.sleep(1)
        rate = (node.frames - seen) / 20
        assert rate <= policy.strangers_block_rate * 1.1
        stranger = await network.transport("hostile 0").dial("node")
        started = asyncio.get_running_loop().time()
        await stranger.send(Ping(0))
        assert (await stranger.receive())[0] == Pong(0)
        assert asyncio.get_running_loop().time() - started < 1.0, "a quiet stranger of the same block has its turn"
        await node.pool.close()
        assert floods


@virtual_time
async def test_newcomers_get_in_while_one_block_opens_connections_and_running_sessions_stay() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    network.hosts = {"hostile": "198.51.100.9", "honest": "192.0.2.1"} | {f"n{i}": f"203.0.{i}.1" for i in range(9)}
    limits = Limits(max_connections=40)
    node = _Node(network, {"honest"}, limits)
    await node.pool.serve()
    honest = await network.transport("honest").dial("node")
    for number in range(9):
        for many in range(30):
            name = f"hostile {number} {many}"
            network.hosts[name] = "198.51.100.9"
            await network.transport(name).dial("node")
        newcomer = await network.transport(f"n{number}").dial("node")
        for connection in (newcomer, honest):
            await connection.send(Ping(number))
            assert (await connection.receive())[0] == Pong(number)
        assert len(node.pool) <= limits.max_connections
    await node.pool.close()


@virtual_time
async def test_frames_that_nobody_asked_for_become_violations_once_no_race_explains_them() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    node = _Node(network, set())
    await node.pool.serve()
    await network.transport("peer").dial("node")
    await asyncio.sleep(0.1)
    burst = int(FrameBudgetPolicy().unasked_burst)
    for _ in range(burst):
        node.pool.unasked("peer", "a query")
    with pytest.raises(ProtocolError, match="nobody asked for"):
        node.pool.unasked("peer", "a query")
    await asyncio.sleep(10)
    node.pool.unasked("peer", "a query")
    await node.pool.close()
