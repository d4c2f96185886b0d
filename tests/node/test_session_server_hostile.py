"""Whatever untrusted peers send, the node lives, honest sessions go on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_fakes import LAYERS, ToyClient, ToyEngine, line_step, open_message, serving, toy_client
from virtual_clock import run, virtual_time

from swarm import codec, kv_token
from swarm.config import Limits
from swarm.errors import NetworkError, NodeLeaving
from swarm.messages import (
    AnyMessage,
    CloseSession,
    DropInFlight,
    KvBlocks,
    KvFetch,
    OpenSession,
    Ping,
    Pong,
    ProgressQuery,
    ProgressReport,
    Reroute,
    SessionFailed,
    SessionOpened,
    Step,
    StepResult,
    WireSampling,
)
from swarm.net.base.transport import Connection
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import LayerSpan

A = b"a" * 16
HOPS = [("node", 0, LAYERS)]
SESSIONS = [bytes([i]) * 16 for i in range(3)]


@virtual_time
async def test_malformed_frames_and_oversized_bodies_end_the_connection_that_sent_them() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    frames = [
        b"\xff" * 64,
        codec.PREFIX.pack(1 << 31, 0),  # a header of two gigabytes
        codec.PREFIX.pack(1, 1 << 31) + b"\xc0",  # a body of two gigabytes
        codec.PREFIX.pack(4, 0) + b"\x93\xa1x\xc0",  # an array that is no message
        codec.PREFIX.pack(5, 0) + struct.pack(">BI", 0xDD, 0xFFFFFFFF),  # an array of four billion
        codec.PREFIX.pack(1, 0) + b"\xc1",
    ]
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service, toy_client(network) as client:
        await client.open(A, HOPS)
        for i, frame in enumerate(frames):
            connection = await network.transport(f"untrusted {i}").dial("node")
            await connection.send_raw(frame)
            with contextlib.suppress(NetworkError):
                await connection.receive()
                raise AssertionError("the node kept talking to somebody who sent rubbish")
        await client.send("node", line_step(A, 0, 0, [1, 2]))
        answer = await client.message()
        assert isinstance(answer, StepResult)
        assert service.sessions == 1


async def violate(connection: Connection, kind: str) -> None:
    """h: a frame that is none, which costs the connection; s: a message that breaks the rules, which is answered."""
    if kind == "h":
        await connection.send_raw(b"\xff" * 64)  # type: ignore[attr-defined]
    else:
        await connection.send(CloseSession(A))  # somebody else's session
    with contextlib.suppress(NetworkError):
        answer, _ = await connection.receive()
        assert isinstance(answer, SessionFailed)
        assert (kind, answer.error) == ("s", "protocol")


async def lives(connection: Connection) -> bool:
    try:
        await connection.send(Ping(1))
        return isinstance((await connection.receive())[0], Pong)
    except NetworkError:
        return False


@pytest.mark.parametrize("kinds", ["s" * 8, "h" * 8, "sh" * 4, "hs" * 4, "sssssssh", "hhhhhhhs"])
@virtual_time
async def test_a_peer_that_mixes_violations_is_cut_off_at_exactly_the_limit(kinds: str) -> None:
    """Broken frames and broken rules are one count, whichever comes last."""
    network, limits = MemoryNetwork(link=LinkModel(0.001)), Limits()
    assert limits.max_protocol_errors == len(kinds) == 8
    node = serving(network, "node", ToyEngine(LayerSpan(0, LAYERS)), limits=limits)
    async with node as service, toy_client(network) as client:
        await client.open(A, HOPS)
        untrusted = network.transport("untrusted")
        bystander = await untrusted.dial("node")  # an honest connection of the same peer
        for number, kind in enumerate(kinds, 1):
            offending = await untrusted.dial("node")
            await violate(offending, kind)
            await offending.close()
            assert await lives(bystander) is (number < len(kinds)), number
            another = await untrusted.dial("node")
            assert await lives(another) is (number < len(kinds)), number
            await another.close()
            await asyncio.sleep(0.1)
        await client.send("node", line_step(A, 0, 0, [1, 2]))
        assert isinstance(await client.message(), StepResult)
        assert service.sessions == 1


def hostile_message(rng: random.Random) -> tuple[AnyMessage, bytes]:
    """Mostly plausible: what breaks servers is what nearly makes sense."""
    session = rng.choice(SESSIONS)
    small = rng.choice([0, 0, 1, 2, 3, 7, 4095])
    kind = rng.randrange(10)
    if kind < 2:
        message: OpenSession = open_message(session, HOPS, 0, 0, LAYERS, rng.choice([0, 1, 20, 1000, 1 << 20]))
        if rng.random() < 0.7:
            history = [rng.randrange(202) for _ in range(rng.choice([0, 1, 4, 30]))]
            penalty = WireSampling(frequency_penalty=1.0, prompt_logprobs=1)
            changes = [
                {"sampling": penalty, "history": history, "prompt_tokens": rng.choice([0, 1, 31])},
                {"sampling": WireSampling(logit_bias=[(rng.randrange(400), 1.0)])},
                {"start": rng.randrange(9), "end": rng.randrange(9)},
                {"downstream": rng.choice(["", "node", "nobody"]), "end": rng.randrange(9)},
                {"model": "another"},
                {"upstream": "somebody"},
                {"kv_source": rng.choice(["node", "nobody"]), "kv_source_tokens": rng.choice([1, 5, 2000])},
            ]
            message = msgspec.structs.replace(message, **rng.choice(changes))
        return message, b""
    if kind < 7:
        line, tree = rng.randrange(4), rng.choice([0, 0, 0, 1, 3])
        step = Step(
            session,
            epoch=rng.choice([0, 0, 0, 1, 2]),
            step=rng.randrange(100),
            committed_before=rng.choice([0, 0, 1, 2, 3, 4, 30]),
            causal_rows=line,
            sample=rng.random() < 0.7,
            tokens=[rng.randrange(210) for _ in range(rng.choice([line + tree, line + tree, small % 9]))],
            parents=[rng.randrange(-1, 5) for _ in range(tree)],
            slots=[rng.randrange(6) for _ in range(tree)],
            commit_slots=[rng.randrange(6) for _ in range(rng.choice([0, 0, 2]))],
            forward_tokens=rng.random() < 0.5,
        )
        return step, rng.choice([b"", b"", b"123", bytes(line + tree)])
    others = [
        CloseSession(session),
        DropInFlight(session, rng.randrange(3), [0, 4095]),
        StepResult(session, 0, 0),
        SessionOpened(session),
    ]
    others += [Reroute(session, rng.randrange(3), rng.choice(["", "x"]), rng.choice(["", "node"]), replay=small)]
    others += [KvFetch(session, rng.randrange(8), small, 1 + small, small), KvBlocks(session, 0, small)]
    others += [ProgressQuery(session), ProgressReport(session, 1, 1)]
    return rng.choice([*others, SessionFailed(session, "x", "y"), Pong(3)]), b""


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_random_messages_break_nothing(seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        network = MemoryNetwork(seed=seed, link=LinkModel(0.002))
        engine = ToyEngine(LayerSpan(0, LAYERS))
        async with serving(network, "node", engine) as service, toy_client(network, "honest") as honest:
            await honest.open(A, HOPS, max_tokens=60)
            for i in range(6):
                async with toy_client(network, f"untrusted {i}") as untrusted:
                    for _ in range(rng.randrange(1, 12)):
                        with contextlib.suppress(NetworkError):
                            await untrusted.send("node", *hostile_message(rng))
                        if rng.random() < 0.2:
                            await asyncio.sleep(rng.random() * 0.05)
                await honest.send("node", line_step(A, i, 2 * i, [1, 2]))
                answer = await honest.message()
                assert isinstance(answer, StepResult), answer
                assert answer.tokens == [8]
            await honest.send("node", CloseSession(A))
            await asyncio.sleep(1)
            assert service.sessions == 0
            assert engine.reserved == {}
            assert service.idle()

    run(scenario())


@virtual_time
async def test_kv_blocks_are_served_only_of_detached_sessions_to_the_heir_that_the_client_named() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with (
        serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service,
        toy_client(network) as client,
        toy_client(network, "target") as target,
    ):
        key = kv_token.hop_key(bytes(32), "node")
        permit = kv_token.fetch_token(key, A, "target")
        await client.send("node", msgspec.structs.replace(open_message(A, HOPS, 0, 0, LAYERS, 60), kv_key=key))
        assert isinstance(await client.message(), SessionOpened)
        await client.send("node", line_step(A, 0, 0, [1, 2, 3, 4, 5]))
        await client.message()

        async def is_refused(thief: ToyClient, token: bytes) -> bool:
            await thief.send("node", KvFetch(A, 0, 0, 2, 5, token))
            return isinstance(refused := await thief.message(), SessionFailed) and refused.error == "unknown_session"

        assert await is_refused(target, permit), "the session is still here"
        service.evict(NodeLeaving("it leaves"), lambda span: True)
        assert isinstance(parted := await client.message(), SessionFailed)
        assert (parted.error, parted.kv_retained_tokens) == ("leaving", 5)
        async with toy_client(network, "thief") as thief:  # that was a hop of this session, and knows its id
            assert await is_refused(thief, permit)
            assert await is_refused(thief, b"")
            assert await is_refused(thief, kv_token.fetch_token(kv_token.hop_key(bytes(32), "hop"), A, "thief"))
        assert await is_refused(target, b"")
        await target.send("node", KvFetch(A, 2, 0, 2, 5, permit))
        assert await target.next() == ("node", KvBlocks(A, 2, 0), bytes([2]) * 8)
        for wrong in (KvFetch(A, LAYERS, 0, 1, 5, permit), KvFetch(A, 0, 2, 1, 5, permit)):  # one more, and it hangs up
            await target.send("node", wrong)
            assert isinstance(failed := await target.message(), SessionFailed)
            assert failed.error == "protocol"
        await client.send("node", line_step(A, 1, 5, [1]))  # it did not know yet
        await client.send("node", CloseSession(A))
        await asyncio.sleep(0.1)
        assert service.sessions == 0


@virtual_time
async def test_a_detached_session_is_dropped_after_its_ttl() -> None:
    network = MemoryNetwork(link=LinkModel(0.001))
    async with serving(network, "node", ToyEngine(LayerSpan(0, LAYERS))) as service, toy_client(network) as client:
        await client.open(A, HOPS, max_tokens=60)
        service.evict(NodeLeaving("it leaves"), lambda span: True)
        assert service.evict(NodeLeaving("it leaves"), lambda span: True) == 0
        assert not service.idle()
        await asyncio.sleep(6)
        assert service.idle()
