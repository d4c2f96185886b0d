"""TLS on our own sockets: bytes of all sizes, whoever is slower sets the pace, and a farewell that loses nothing."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl

import pytest

from swarm.net.identity import Identity
from swarm.net.tls_identity import contexts
from swarm.net.tls_transport import TlsTransport, shake_hands


class Collector(asyncio.BufferedProtocol):
    """Reads into odd buffers and keeps what came."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._room = bytearray()
        self.came = bytearray()
        self.transport: TlsTransport
        self.writable = asyncio.Event()
        self.writable.set()
        self.lost = asyncio.get_running_loop().create_future()
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, TlsTransport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        self._room = bytearray(self._rng.choice((1, 100, 16 << 10, 70_000, 400_000)))
        return memoryview(self._room)

    def buffer_updated(self, nbytes: int) -> None:
        self.came += self._room[:nbytes]

    def eof_received(self) -> bool:
        self.ended = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()


async def two(seed: int = 1) -> tuple[Collector, Collector]:
    """The ends of one connection."""
    rng = random.Random(seed)
    listener = socket.create_server(("127.0.0.1", 0))
    ends = [socket.create_connection(listener.getsockname())]
    ends.append(listener.accept()[0])
    listener.close()
    for end in ends:
        end.setblocking(False)
    server, client = contexts(Identity.generate())
    secured = await asyncio.gather(shake_hands(ends[0], client, False), shake_hands(ends[1], server, True))
    protocols = Collector(rng), Collector(rng)
    for tls, protocol in zip(secured, protocols, strict=True):
        TlsTransport(tls, protocol)
    return protocols


async def send(protocol: Collector, data: bytes, rng: random.Random) -> None:
    rest = memoryview(data)
    while rest:
        size = rng.choice((1, 300, 16 << 10, 17_000, 300_000))
        protocol.transport.write(rest[:size])
        rest = rest[size:]
        await protocol.writable.wait()


@pytest.mark.parametrize("seed", range(3))
async def test_bytes_arrive_whole_both_ways_at_once_and_a_close_loses_none(seed: int) -> None:
    rng = random.Random(seed)
    left, right = await two(seed)
    there, back = rng.randbytes(3_000_000), rng.randbytes(2_000_000)
    async with asyncio.timeout(20):
        await asyncio.gather(send(left, there, rng), send(right, back, rng))
        right.transport.close()  # at once, though most of it may still be on its way
        assert await left.lost is None
        assert await right.lost is None
    assert left.came == back
    assert left.ended
    assert there.startswith(bytes(right.came))
    assert right.transport.is_closing()
    left.transport.write(b"too late")
    left.transport.abort()


async def test_a_reader_that_rests_holds_the_sender_back() -> None:
    rng = random.Random(5)
    left, right = await two()
    right.transport.pause_reading()
    assert not right.transport.is_reading()
    data = rng.randbytes(64 << 20)
    async with asyncio.timeout(20):
        sending = asyncio.create_task(send(left, data, rng))
        await asyncio.sleep(0.3)
        assert not sending.done()
        assert not right.came
        assert 0 < left.transport.get_write_buffer_size() < 1 << 20
        right.transport.resume_reading()
        await sending
        left.transport.close()
        assert await right.lost is None
    assert right.came == data


async def test_an_aborted_end_is_told_and_the_other_sees_it() -> None:
    left, right = await two()
    left.transport.write(bytes(1000))
    left.transport.abort()
    left.transport.abort()
    async with asyncio.timeout(5):
        assert await left.lost is None
        await right.lost
    right.transport.abort()


async def test_a_handshake_that_fails_closes_the_socket() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    with far:
        far.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ssl.SSLError):
            await shake_hands(near, contexts(Identity.generate())[0], True)
    assert near.fileno() == -1
