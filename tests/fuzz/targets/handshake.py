"""The handshake before the first frame, both parts: it ends with an error of the network, or the peer proved itself."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Coroutine, Iterator
from typing import Any

from fake_stream import FakeTransport, feed

from swarm.errors import NetworkError
from swarm.net.base.frame_stream import FramedStream, varint
from swarm.net.base.handshake import NONCE, PROOF, accept_handshake, dial_handshake

INSTRUMENT = ("swarm.net.base.frame_stream", "swarm.net.base.handshake")
_runner = asyncio.Runner()  # one for all runs: a loop takes longer to make than a handshake
atexit.register(_runner.close)


def run(data: bytes) -> None:
    _runner.run(_both(data))


async def _both(data: bytes) -> None:
    await _one(data, lambda stream: accept_handshake(stream, "us", _secret, 1.0))
    await _one(data, lambda stream: dial_handshake(stream, "us", _secret, 1.0))


async def _one(data: bytes, part: Any) -> None:
    stream = FramedStream(preamble=True)
    stream.peer = "them"
    stream.connection_made(FakeTransport())
    size = data[0] + 1 if data else 1
    feed(stream, data[1:], size)
    stream.connection_lost(None)
    handshake: Coroutine[Any, Any, None] = part(stream)
    try:
        await handshake
    except NetworkError:
        return
    raise AssertionError("a peer without the secret was let in")


def _secret(*parts: bytes) -> bytes:
    return b"\x11" * PROOF if parts[0] == b"never" else bytes(PROOF)[:-1] + b"\x01\x02"


def seeds() -> Iterator[bytes]:
    yield b"\xff" + varint(NONCE + PROOF) + bytes(NONCE + PROOF)
    yield b"\x02" + varint(NONCE) + bytes(NONCE) + varint(PROOF) + bytes(PROOF) + bytes(9)
    yield b"\x00" + b"\x80" * 9
