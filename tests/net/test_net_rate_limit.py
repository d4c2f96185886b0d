"""A cap on what is sent: exact over time, shared by all connections, and frames stay in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from transport_conformance import echo
from virtual_clock import virtual_time

from swarm.messages import CloseSession, Ping
from swarm.net.transports.rate_limit import FRAME_OVERHEAD, RateLimitedTransport, UploadBucket
from swarm.testing.memory_network import LinkModel, MemoryNetwork

BURST_S = 0.25


@contextlib.asynccontextmanager
async def pair(rate: float) -> AsyncIterator[tuple[RateLimitedTransport, UploadBucket]]:
    network = MemoryNetwork(link=LinkModel(delay_s=0.001))
    listener = network.transport("listener")
    await listener.serve(echo)
    upload = UploadBucket(rate, BURST_S)
    transport = RateLimitedTransport(network.transport("caller"), upload)
    yield transport, upload
    await transport.close()
    await listener.close()


@virtual_time
async def test_bytes_leave_at_the_rate_whatever_the_connection() -> None:
    async with pair(1e6) as (transport, upload):
        connections = [await transport.dial("listener") for _ in range(2)]
        begun = asyncio.get_running_loop().time()
        for i in range(10):
            await connections[i % 2].send(CloseSession(bytes(16)), bytes(500_000))
            await connections[i % 2].receive()
        took = asyncio.get_running_loop().time() - begun
        assert upload.sent == 10 * (500_000 + FRAME_OVERHEAD)
        assert took == pytest.approx(upload.sent / 1e6 - BURST_S, abs=0.1)


@virtual_time
async def test_frames_keep_their_order_and_small_ones_are_not_held_up_for_long() -> None:
    async with pair(1e6) as (transport, _):
        connection = await transport.dial("listener")
        async with asyncio.TaskGroup() as group:
            for nonce in range(20):
                group.create_task(connection.send(Ping(nonce), bytes(10_000)))
        assert [(await connection.receive())[0] for _ in range(20)] == [Ping(nonce) for nonce in range(20)]


@virtual_time
async def test_no_cap_means_no_waiting_and_what_is_closed_is_forgotten() -> None:
    async with pair(float("inf")) as (transport, upload):
        connection = await transport.dial("listener")
        begun = asyncio.get_running_loop().time()
        await connection.send(Ping(1), bytes(3_000_000))
        assert asyncio.get_running_loop().time() == begun
        assert upload.sent > 3_000_000
        await connection.close()
        assert transport._live == {}
