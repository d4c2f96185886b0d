"""The in-process network: the shared conformance suite, and what it models of links and deaths, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from transport_conformance import SESSION, SMALL, Conformance, echo
from virtual_clock import run, virtual_time, wall_clock

from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable, ProtocolError
from swarm.messages import DropInFlight, Ping
from swarm.net.base.transport import Transport
from swarm.testing.memory_network import LinkModel, MemoryNetwork


class TestMemory(Conformance):
    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Transport, Transport]]:
        network = MemoryNetwork()
        caller, listener = network.transport("caller"), network.transport("listener", SMALL)
        yield caller, listener
        await caller.close()
        await listener.close()


@virtual_time
async def test_delay_and_rate() -> None:
    network = MemoryNetwork(link=LinkModel(delay_s=0.02, rate=1e6))
    a, b = network.transport("a"), network.transport("b")
    await b.serve(echo)
    loop = asyncio.get_running_loop()
    connection = await a.dial("b")
    assert loop.time() == pytest.approx(0.04)  # a handshake costs a round trip
    start = loop.time()
    await connection.send(Ping(1))
    await connection.receive()
    assert loop.time() - start == pytest.approx(0.04, abs=1e-4)
    start = loop.time()
    await connection.send(DropInFlight(SESSION, 1), bytes(1_000_000))
    await connection.receive()
    assert loop.time() - start == pytest.approx(2.04, abs=1e-2)
    assert network.sent["a", "b"] == network.sent["b", "a"] > 1_000_000
    assert network.frames["a", "b"] == 2


@virtual_time
async def test_the_two_directions_of_a_link_can_differ() -> None:
    network = MemoryNetwork()
    network.set_link("a", "b", LinkModel(delay_s=1.0), both=False)
    a, b = network.transport("a"), network.transport("b")
    await b.serve(echo)
    connection = await a.dial("b")
    start = asyncio.get_running_loop().time()
    await connection.send(Ping(1))
    await connection.receive()
    assert asyncio.get_running_loop().time() - start == pytest.approx(1.0)


async def _lossy_times(seed: int) -> list[float]:
    network = MemoryNetwork(seed, LinkModel(delay_s=0.01, loss=0.2))
    a, b = network.transport("a"), network.transport("b")
    await b.serve(echo)
    connection = await a.dial("b")
    times = []
    for i in range(50):
        await connection.send(Ping(i))
    for i in range(50):
        assert (await connection.receive())[0] == Ping(i)  # in order, none missing
        times.append(asyncio.get_running_loop().time())
    await a.close()
    await b.close()
    return times


def test_loss_costs_time_and_repeats_itself() -> None:
    first, again, other = run(_lossy_times(1)), run(_lossy_times(1)), run(_lossy_times(2))
    assert first == again
    assert first != other
    assert first[-1] > 0.04 + 0.02


@virtual_time
async def test_a_killed_peer() -> None:
    network = MemoryNetwork(link=LinkModel(delay_s=0.05))
    a, b = network.transport("a"), network.transport("b")
    await b.serve(echo)
    connection = await a.dial("b")
    start = asyncio.get_running_loop().time()
    network.kill("b")
    with pytest.raises(ConnectionLost):
        await connection.receive()
    assert asyncio.get_running_loop().time() - start == pytest.approx(0.05)
    with pytest.raises(ConnectionLost):
        await connection.send(Ping(1))
    with pytest.raises(PeerUnreachable):
        await a.dial("b")
    reborn = network.transport("b")
    await reborn.serve(echo)
    connection = await a.dial("b")
    await b.close()  # of the dead one: must not touch the living
    await connection.send(Ping(2))
    assert (await connection.receive())[0] == Ping(2)


@virtual_time
async def test_a_machine_that_crashes_silently_resets_nothing() -> None:
    network = MemoryNetwork()
    a, b = network.transport("a", dial_timeout_s=7.0), network.transport("b")
    await b.serve(echo)
    connection = await a.dial("b")
    network.kill("b", silent=True)
    await connection.send(Ping(1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await connection.receive()
    start = asyncio.get_running_loop().time()
    with pytest.raises(PeerUnreachable):
        await a.dial("b")
    assert asyncio.get_running_loop().time() - start == pytest.approx(7.0)
    with pytest.raises(NetworkError):
        await network.directory("b").read("m")


@virtual_time
async def test_a_machine_that_restarts_resets_what_was_connected_to_it_before() -> None:
    """Else its former instance, whose end was silent, would answer in its place."""
    network = MemoryNetwork()
    a, b = network.transport("a"), network.transport("b")
    await b.serve(echo)
    before = await a.dial("b")
    network.kill("b", silent=True)
    await asyncio.sleep(60.0)
    reborn = network.transport("b")
    await reborn.serve(echo)
    with pytest.raises(ConnectionLost):
        await before.receive()
    connection = await a.dial("b")
    await connection.send(Ping(3))
    assert (await connection.receive())[0] == Ping(3)


@virtual_time
async def test_frames_wait_out_a_partition() -> None:
    network = MemoryNetwork()
    a, b = network.transport("a"), network.transport("b")
    await b.serve(echo)
    connection = await a.dial("b")
    network.partition("a", "b")
    for i in range(3):
        await connection.send(Ping(i))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await connection.receive()
    network.heal("b", "a")
    for i in range(3):
        assert (await connection.receive())[0] == Ping(i)


@virtual_time
async def test_hostile_bytes() -> None:
    network = MemoryNetwork()
    a, b = network.transport("a"), network.transport("b")
    errors: list[ProtocolError] = []

    async def handler(connection: object) -> None:
        try:
            await connection.receive()  # type: ignore[attr-defined]
        except ProtocolError as error:
            errors.append(error)

    await b.serve(handler)
    connection = await a.dial("b")
    await connection.send_raw(b"\x05\0\0\0\0\0\0\0hello")
    with pytest.raises(ConnectionLost):
        await connection.receive()
    assert len(errors) == 1


@virtual_time
async def test_directory() -> None:
    network = MemoryNetwork(clock=wall_clock)
    a, b = network.directory("a"), network.directory("b")
    await a.publish(b"one", "m", wall_clock() + 10)
    await b.publish(b"two", "m", wall_clock() + 20)
    await b.publish(b"other", "n", wall_clock() + 20)
    assert await b.read("m") == {"a": b"one", "b": b"two"}
    await asyncio.sleep(15)
    assert await a.read("m") == {"b": b"two"}
    await asyncio.sleep(10)
    assert await a.read("m") == {}
    assert await a.read("unknown") == {}
