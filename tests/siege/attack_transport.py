"""Attacks below the messages: handshakes, frames and connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable

import msgspec
from hostile import Siege, Victim, raw_write, session_id, stop_reading

from swarm.codec import DEFAULT_LIMITS, PREFIX
from swarm.errors import NetworkError
from swarm.messages import Ping
from swarm.net.security.identity import Identity
from swarm.net.transports.tls import TlsTransport

Run = Callable[[], Awaitable[None]]
LINKS = 4
HALF_OPEN = 400  # connections to a node
IDENTITIES = 1000


async def big_headers(siege: Siege) -> Run:
    """Frames with as large a header as is allowed: one that is a message, and takes long to decode."""
    header = msgspec.msgpack.encode(["drop_in_flight", session_id(), 1, [n % 4096 for n in range(4096)]])
    nested = b"\x93" * 900 + b"\xc0"
    huge = msgspec.msgpack.encode(["open", session_id(), "m", "w", "fp32", 0, 1, 1, "", "", None, [7] * (1 << 18)])
    junk = b"\x92\xa4ping" + b"\xdd" + (1 << 20).to_bytes(4, "big") + bytes(3 << 20)
    frames = [PREFIX.pack(len(h), 0) + h for h in (huge, junk, header, nested)]

    async def one(node: Victim) -> None:
        transport = await siege.transport()
        number = 0
        while siege.running:
            try:
                stream = await siege.link(node, transport)
                while siege.running:
                    number += 1
                    await raw_write(stream, frames[number % len(frames)])
                    siege.counts["frames"] += 1
                    await asyncio.sleep(0.002)
            except NetworkError:
                siege.counts["cut off"] += 1
                transport = await siege.transport()  # another identity

    return lambda: siege.all_of(one(node) for node in siege.target.nodes for _ in range(LINKS))


async def big_bodies(siege: Siege) -> Run:
    """Announces bodies of the largest size and sends most of each, slowly, on many connections."""
    prefix = PREFIX.pack(20, DEFAULT_LIMITS.body)
    transports = [await siege.transport() for _ in range(8)]

    async def one(node: Victim, transport: TlsTransport) -> None:
        stream = await siege.link(node, transport)
        await raw_write(stream, prefix + bytes(20))
        for _ in range(40):
            if siege.running:
                await raw_write(stream, bytes(1 << 20))
                siege.counts["MiB"] += 1
                await asyncio.sleep(0.1)
        await siege.over()

    return lambda: siege.all_of(one(node, t) for node in siege.target.nodes for t in transports)


async def half_open_tls(siege: Siege) -> Run:
    """TCP connections that say nothing, or the first bytes of a TLS handshake."""

    async def one(node: Victim) -> None:
        held: list[socket.socket] = []
        loop = asyncio.get_running_loop()
        try:
            while siege.running:
                if len(held) >= HALF_OPEN:
                    held.pop(0).close()
                sock = socket.socket()
                sock.setblocking(False)
                held.append(sock)
                with contextlib.suppress(OSError):
                    async with asyncio.timeout(1.0):
                        await loop.sock_connect(sock, node.endpoint)
                        await loop.sock_sendall(sock, b"\x16\x03\x01\x02\x00" + os.urandom(64) * (len(held) % 2))
                siege.counts["half-open"] += 1
                await asyncio.sleep(0.002)
        finally:
            for sock in held:
                sock.close()

    return lambda: siege.all_of(one(node) for node in siege.target.nodes)


async def slow_readers(siege: Siege) -> Run:
    """Many connections that ask and never read the answers."""
    transports = [await siege.transport() for _ in range(8)]

    async def one(node: Victim, transport: TlsTransport) -> None:
        stream = await siege.link(node, transport, read=False)
        stop_reading(stream)
        number = 0
        while siege.running:
            number += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stream.send(Ping(number))
                    await stream.send(siege.open_message(node, session_id(), model="?"))
            siege.counts["asked"] += 1
            await asyncio.sleep(0.005)

    return lambda: siege.all_of(one(node, t) for node in siege.target.nodes for t in transports)


async def many_connections(siege: Siege) -> Run:
    """Whole handshakes, each of another peer id, kept open: 1,000 of them."""
    transports = [await siege.transport() for _ in range(64)]  # a certificate costs us 10 ms; identities are reused

    async def one(node: Victim, number: int) -> None:
        held = []
        for i in range(IDENTITIES):
            if not siege.running:
                return
            try:
                async with asyncio.timeout(5.0):
                    held.append(await siege.link(node, transports[(i + 7 * number) % len(transports)]))
                siege.counts["connected"] += 1
            except (NetworkError, TimeoutError):
                siege.counts["refused"] += 1
            await asyncio.sleep(0.002)
        await siege.over()

    return lambda: siege.all_of(one(node, i) for i, node in enumerate(siege.target.nodes))


async def malformed(siege: Siege) -> Run:
    """Random bytes after the handshake, a new identity for each connection that is cut."""

    async def one(node: Victim) -> None:
        while siege.running:
            transport = await TlsTransport.start(Identity.generate())
            try:
                stream = await siege.link(node, transport)
                while siege.running:
                    junk = siege.rng.randbytes(siege.rng.randrange(1, 512))
                    await raw_write(stream, PREFIX.pack(len(junk), 0) + junk)
                    siege.counts["frames"] += 1
                    await asyncio.sleep(0.001)
            except NetworkError:
                siege.counts["cut off"] += 1
            finally:
                await transport.close()

    return lambda: siege.all_of(one(node) for node in siege.target.nodes)
