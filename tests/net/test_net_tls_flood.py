"""Floods at the TLS transport, from raw sockets: unfinished handshakes, and more connections than anybody needs.

The hardest case: the flood and the honest peer share an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from transport_conformance import echo

from swarm.messages import Ping
from swarm.net.base.half_open import HandshakePolicy
from swarm.net.base.transport import Connection, TransportPolicy
from swarm.net.security.identity import Identity
from swarm.net.transports.tls import TlsTransport

POLICY = HandshakePolicy(
    timeout_s=2.0,
    max_half_open=24,
    max_half_open_per_block=8,
    per_s=1000.0,
    burst=1000.0,
    block_per_s=1000.0,
    block_burst=1000.0,
)


@contextlib.asynccontextmanager
async def listening(policy: HandshakePolicy = POLICY) -> AsyncIterator[tuple[TlsTransport, TlsTransport]]:
    """(an honest caller, a listener that echoes)"""
    listener = await TlsTransport.start(Identity.generate(), ["127.0.0.1"], policy=TransportPolicy(handshakes=policy))
    caller = await TlsTransport.start(Identity.generate())
    await listener.serve(echo)
    try:
        yield caller, listener
    finally:
        await caller.close()
        await listener.close()


async def half_open(listener: TlsTransport, said: bytes = b"") -> socket.socket:
    """A TCP connection that goes no further than `said`."""
    raw = socket.socket()
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", listener.bound[0].port))
    if said:
        await asyncio.get_running_loop().sock_sendall(raw, said)
    return raw


async def works(caller: TlsTransport, listener: TlsTransport) -> bool:
    connection: Connection = await caller.dial(listener.peer, listener.addresses)
    await connection.send(Ping(7))
    answered = (await connection.receive())[0] == Ping(7)
    await connection.close()
    return answered


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


async def test_unfinished_handshakes_are_few_and_end_soon_and_others_get_in() -> None:
    async with listening() as (caller, listener):
        table = listener._acceptor.half_open
        held = [await half_open(listener, said) for said in (b"", b"\x16\x03\x01\x02\x00") for _ in range(25)]
        await asyncio.sleep(0.3)
        assert len(table) <= POLICY.max_half_open_per_block
        assert await works(caller, listener)
        await asyncio.sleep(POLICY.timeout_s + 0.5)
        assert len(table) == 0
        for raw in held:
            raw.close()


async def test_a_flood_costs_few_descriptors_and_all_come_back() -> None:
    async with listening() as (caller, listener):
        assert await works(caller, listener)
        await asyncio.sleep(0.2)
        before = descriptors()
        most = 0
        for _ in range(8):
            held = [await half_open(listener) for _ in range(50)]
            await asyncio.sleep(0.1)
            most = max(most, descriptors() - before - len(held))
            for raw in held:
                raw.close()
        # Those that wait in the kernel's queue have no descriptor here.
        assert most <= POLICY.max_half_open_per_block + 4
        assert await works(caller, listener)
        await asyncio.sleep(1.0)
        assert descriptors() <= before + 4


async def test_what_is_over_the_rate_is_refused_before_tls() -> None:
    policy = replace(POLICY, block_per_s=5.0, block_burst=10.0)
    async with listening(policy) as (caller, listener):
        table = listener._acceptor.half_open
        held = [await half_open(listener) for _ in range(60)]
        await asyncio.sleep(0.5)
        assert table.refused >= 40
        ended = 0
        for raw in held:
            with contextlib.suppress(BlockingIOError, OSError):
                ended += raw.recv(1) == b""
            raw.close()
        assert ended >= 40
        await asyncio.sleep(0.5)
        assert await works(caller, listener), "when the flood is over"


async def test_finished_handshakes_count_no_more() -> None:
    async with listening() as (caller, listener):
        opened = [await caller.dial(listener.peer, listener.addresses) for _ in range(20)]
        await asyncio.sleep(0.1)
        assert len(listener._acceptor.half_open) == 0
        for connection in opened:
            await connection.send(Ping(1))
            assert (await connection.receive())[0] == Ping(1)
