"""The frame parser on a socket pair: any way of cutting the bytes, large bodies, hostile lengths, back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator

import psutil
import pytest

from swarm import codec
from swarm.codec import FrameLimits
from swarm.errors import ConnectionLost, ProtocolError
from swarm.messages import AnyMessage, DropInFlight, Ping
from swarm.net.base.frame_stream import POLICY, FramedStream

SESSION = bytes(16)


@contextlib.asynccontextmanager
async def stream(
    limits: FrameLimits = codec.DEFAULT_LIMITS, preamble: bool = False
) -> AsyncIterator[tuple[FramedStream, socket.socket]]:
    """A FramedStream and the bare socket at its other end."""
    near, far = socket.socketpair()
    far.setblocking(False)
    loop = asyncio.get_running_loop()
    _, frames = await loop.create_unix_connection(lambda: FramedStream(limits, preamble), sock=near)
    try:
        yield frames, far
    finally:
        frames.abort()
        await frames.closed()
        far.close()


def frame(message: AnyMessage, body: bytes = b"") -> bytes:
    return codec.encode(message, body)[0] + body


FRAMES: list[tuple[AnyMessage, bytes]] = [
    (Ping(1), b""),
    (DropInFlight(SESSION, 2, [1, 2, 3]), b"abc"),
    (DropInFlight(SESSION, 3), os.urandom(POLICY.read_buffer - 40)),
    (DropInFlight(SESSION, 4), os.urandom(POLICY.read_buffer)),
    (DropInFlight(SESSION, 5, list(range(4000))), os.urandom(POLICY.write_chunk + 1)),
    (Ping(6), b""),
]
BYTES = b"".join(frame(message, body) for message, body in FRAMES)


@pytest.mark.parametrize("seed", range(6))
async def test_the_bytes_may_be_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()
    async with stream() as (frames, far):

        async def feed() -> None:
            at = 0
            while at < len(BYTES):
                size = chance.choice((1, 2, 7, 100, 5000, POLICY.read_buffer, POLICY.write_chunk))
                await loop.sock_sendall(far, BYTES[at : at + size])
                at += size
                if chance.random() < 0.5:
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(feed())
            for message, body in FRAMES:
                assert await frames.receive() == (message, body)


@pytest.mark.parametrize("seed", range(6))
async def test_small_frames_of_one_turn_go_together_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    sizes = (
        0,
        1,
        1024,
        POLICY.coalesce_below,
        POLICY.coalesce_below + 1,
        POLICY.read_buffer,
        POLICY.read_buffer + 1,
        POLICY.write_chunk + 7,
    )
    sent = [(DropInFlight(SESSION, i), rng.randbytes(rng.choice(sizes[: rng.choice((3, 8))]))) for i in range(120)]
    near, far = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, writer = await loop.create_unix_connection(FramedStream, sock=near)
    _, reader = await loop.create_unix_connection(FramedStream, sock=far)
    writes: list[int] = []
    write = FramedStream._write
    monkeypatch.setattr(FramedStream, "_write", lambda self, data: (writes.append(len(data)), write(self, data)))

    async def send() -> None:
        for message, body in sent:
            await writer.send(message, body)
            if rng.random() < 0.05:
                await asyncio.sleep(0)
        await writer.close()  # what waits for the end of the turn goes first

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        for message, body in sent:
            assert await reader.receive() == (message, body)
    with pytest.raises(ConnectionLost):
        await reader.receive()
    assert sum(writes) == sum(len(frame(message, body)) for message, body in sent)
    assert len(writes) < 120 + sum(len(body) // POLICY.write_chunk for _, body in sent)
    await reader.close()


async def test_many_small_frames_in_one_read() -> None:
    async with stream() as (frames, far):
        far.sendall(b"".join(frame(Ping(i)) for i in range(5000)))
        for i in range(5000):
            assert (await frames.receive())[0] == Ping(i)


async def test_a_body_can_be_written_to() -> None:
    async with stream() as (frames, far):
        far.sendall(frame(Ping(1), b"abcd"))
        _, body = await frames.receive()
        body[0] = 0
        assert body == b"\0bcd"


@pytest.mark.parametrize("cut", [1, 3, 8, 11, 12, 30])
async def test_a_preamble_comes_first(cut: int) -> None:
    data = b"\x0ahello word" + frame(Ping(1), b"body")
    async with stream(preamble=True) as (frames, far):
        far.sendall(data[:cut])
        await asyncio.sleep(0.01)
        far.sendall(data[cut:])
        assert await frames.preamble() == b"hello word"
        frames.begin()
        assert await frames.receive() == (Ping(1), b"body")


async def test_no_frame_is_looked_at_before_the_preambles_are_done_with() -> None:
    async with stream(preamble=True) as (frames, far):
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(far, b"\x02ab\x00\x01c" + frame(Ping(1), bytes(300_000)) * 3))
        await asyncio.sleep(0.02)
        assert [await frames.preamble() for _ in range(3)] == [b"ab", b"", b"c"]
        waiting = asyncio.create_task(frames.receive())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        frames.begin()
        assert await waiting == (Ping(1), bytes(300_000))
        for _ in range(2):
            assert await frames.receive() == (Ping(1), bytes(300_000))
        await sending


async def test_a_preamble_over_the_limit_its_reader_sets() -> None:
    async with stream(preamble=True) as (frames, far):
        far.sendall(b"\x20" + bytes(32))
        with pytest.raises(ProtocolError, match="32"):
            await frames.preamble(limit=31)
        with pytest.raises(ConnectionLost):
            await frames.receive()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\xff\xff", b"\xff\xff\xff\x7f"])
async def test_a_hostile_preamble(data: bytes) -> None:
    async with stream(preamble=True) as (frames, far):
        far.sendall(data)
        with pytest.raises(ProtocolError):
            await frames.preamble()


async def test_a_preamble_that_never_comes() -> None:
    async with stream(preamble=True) as (frames, far):
        far.sendall(b"\x0ahel")
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost):
            await frames.preamble()


@pytest.mark.parametrize("prefix", [b"\xff" * 8, b"\0\0\0\0\xff\xff\xff\xff", b"\xff\xff\xff\xff\0\0\0\0"])
async def test_lengths_over_the_limit_end_the_stream_after_what_came_before(prefix: bytes) -> None:
    async with stream() as (frames, far):
        far.sendall(frame(Ping(1)) + prefix)
        assert (await frames.receive())[0] == Ping(1)
        with pytest.raises(ProtocolError):
            await frames.receive()
        with pytest.raises(ConnectionLost):
            await frames.receive()
        with pytest.raises(ConnectionLost):
            await frames.send(Ping(2))


async def test_headers_that_are_no_message() -> None:
    for header in (b"", b"\xc1", b"hello", b"\x92\xa4ping\xff"):
        async with stream() as (frames, far):
            far.sendall(codec.PREFIX.pack(len(header), 3) + header + b"abc")
            with pytest.raises(ProtocolError):
                await frames.receive()
            with pytest.raises(ConnectionLost):
                await frames.receive()


async def test_announcing_a_large_body_costs_nothing() -> None:
    before = psutil.Process().memory_info().rss
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(16):
            _, far = await stack.enter_async_context(stream())
            header = frame(Ping(1))[codec.PREFIX.size :]
            far.sendall(codec.PREFIX.pack(len(header), 64 << 20) + header + b"x")
        await asyncio.sleep(0.05)
        assert psutil.Process().memory_info().rss - before < 64 << 20


async def test_what_nobody_receives_is_not_read() -> None:
    data = frame(DropInFlight(SESSION, 0), bytes(100_000))
    loop = asyncio.get_running_loop()
    async with stream() as (frames, far):
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 16 * POLICY.unread_high:
                async with asyncio.timeout(0.2):
                    await loop.sock_sendall(far, data)
                sent += len(data)
        assert sent < 4 * POLICY.unread_high
        for _ in range(sent // len(data)):
            await frames.receive()


async def test_a_truncated_frame_is_not_delivered() -> None:
    async with stream() as (frames, far):
        far.sendall(frame(Ping(1)) + frame(Ping(2), bytes(1000))[:-1])
        far.shutdown(socket.SHUT_WR)
        assert (await frames.receive())[0] == Ping(1)
        with pytest.raises(ConnectionLost):
            await frames.receive()
