"""The shaping wrapper over the in-process network: the conformance suite, then delay, rate and back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from transport_conformance import SESSION, SMALL, Conformance, echo
from virtual_clock import virtual_time

from swarm.messages import DropInFlight, Ping
from swarm.net.base.transport import Connection, Transport
from swarm.testing.emulated_link import WINDOW, EmulatedTransport, LinkShape
from swarm.testing.memory_network import MemoryNetwork


class TestShaped(Conformance):
    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Transport, Transport]]:
        network = MemoryNetwork()
        shape = LinkShape(0.002, 1e9, 0.001, 1e9)
        caller = EmulatedTransport(network.transport("caller"), shape)
        listener = EmulatedTransport(network.transport("listener", SMALL), shape)
        yield caller, listener
        await caller.close()
        await listener.close()


async def slow_pair(shape: LinkShape) -> tuple[Connection, asyncio.AbstractEventLoop]:
    network = MemoryNetwork()
    listener = network.transport("listener")
    await listener.serve(echo)
    connection = await EmulatedTransport(network.transport("caller"), shape).dial("listener")
    return connection, asyncio.get_running_loop()


@virtual_time
async def test_each_direction_has_its_delay() -> None:
    connection, loop = await slow_pair(LinkShape(send_delay_s=0.02, receive_delay_s=0.05))
    for i in range(3):
        await connection.send(Ping(i))
    for i in range(3):
        assert (await connection.receive())[0] == Ping(i)
    assert loop.time() == pytest.approx(0.07)


@virtual_time
async def test_the_rate_is_shared_by_all_connections() -> None:
    network = MemoryNetwork()
    listener = network.transport("listener")
    await listener.serve(echo)
    transport = EmulatedTransport(network.transport("caller"), LinkShape(send_rate=1e6))
    connections = [await transport.dial("listener") for _ in range(2)]
    for connection in connections:
        await connection.send(DropInFlight(SESSION, 0), bytes(500_000))
    for connection in connections:
        await connection.receive()
    assert asyncio.get_running_loop().time() == pytest.approx(1.0, rel=0.01)


@virtual_time
async def test_a_full_line_holds_its_sender_back() -> None:
    connection, loop = await slow_pair(LinkShape(send_rate=1e6))
    chunk = bytes(WINDOW // 4)
    for _ in range(12):
        await connection.send(DropInFlight(SESSION, 0), chunk)
    assert loop.time() == pytest.approx(8 * len(chunk) / 1e6, rel=0.15)
