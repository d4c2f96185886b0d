"""Frames cut from a byte stream: however the bytes arrive, they are the same frames, or the connection ends."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Iterator

from fake_stream import FakeTransport, feed

from swarm import codec
from swarm.codec import FrameLimits
from swarm.errors import NetworkError
from swarm.messages import AnyMessage, Ping
from swarm.net.base.frame_stream import FramedStream

INSTRUMENT = ("swarm.codec", "swarm.net.base.frame_stream")
LIMITS = FrameLimits(header=4096, body=1 << 20)
_runner = asyncio.Runner()  # one for all runs: a loop takes longer to make than a frame to read
atexit.register(_runner.close)


def run(data: bytes) -> None:
    _runner.run(_compare(data))


async def _compare(data: bytes) -> None:
    pieces = (data[0] + 1 if data else 1), 1 << 16
    first, second = (_frames(data[1:], size) for size in pieces)
    assert first == second, f"{first} in small pieces, {second} in large ones"


def _frames(data: bytes, size: int) -> list[tuple[AnyMessage, bytes]]:
    stream = FramedStream(LIMITS)
    stream.connection_made(FakeTransport())
    feed(stream, data, size)
    stream.connection_lost(None)
    found: list[tuple[AnyMessage, bytes]] = []
    try:
        while True:
            message, body = _next(stream)
            found.append((message, bytes(body)))
    except NetworkError:
        return found


def _next(stream: FramedStream) -> tuple[AnyMessage, memoryview]:
    """The next frame, which has arrived whole or never will: nothing is waited for."""
    step = stream.receive()
    try:
        step.send(None)
    except StopIteration as done:
        frame: tuple[AnyMessage, memoryview] = done.value
        return frame
    raise AssertionError("a closed connection waits for more")


def seeds() -> Iterator[bytes]:
    frames = [b"".join(bytes(part) for part in codec.encode(Ping(n), b"x" * n)) for n in (0, 3, 300)]
    yield b"\x03" + b"".join(frames)
    yield b"\xff" + frames[2] + frames[0][:-1]
    yield b"\x00" + (1 << 30).to_bytes(4, "little") * 2
