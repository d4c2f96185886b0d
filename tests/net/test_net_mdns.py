"""Multicast DNS on the loopback interface only: members of one group find each other, others learn nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncZeroconf

from swarm.net.discovery.mdns import MAX_ADDRESSES, SERVICE, MdnsPolicy, MdnsService, SwarmTag, browse
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret

pytestmark = pytest.mark.processes

LOOPBACK = ["127.0.0.1"]
PEER = Identity.from_seed(bytes(32)).peer
OPEN = SwarmTag("home", "smollm2-135m")
SECRET = SwarmSecret("one secret of many")
PRIVATE = SwarmTag("home", "smollm2-135m", SECRET)


async def ignore(addresses: tuple[str, ...]) -> None:
    return None


@contextlib.asynccontextmanager
async def advertised(tag: SwarmTag, port: int) -> AsyncIterator[str]:
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}"
    node = await MdnsService.start(tag, ignore, LOOPBACK)
    try:
        await node.advertise((address,))
        yield address
    finally:
        await node.close()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_members_find_each_other_and_others_do_not(port: int) -> None:
    async with advertised(PRIVATE, port) as address, advertised(OPEN, port):
        others = (
            SwarmTag("office", "smollm2-135m"),
            SwarmTag("home", "another"),
            SwarmTag("home", "another", SECRET),
            SwarmTag("home", "smollm2-135m", SwarmSecret("another secret of many")),
        )
        answers = await asyncio.gather(*(browse(tag, LOOPBACK, MdnsPolicy(4.0)) for tag in (OPEN, PRIVATE, *others)))
    assert answers == [(address,), (address,), (), (), (), ()]


async def test_an_announcement_of_a_node_that_is_gone_is_ignored(port: int) -> None:
    async with advertised(OPEN, 1):
        assert await browse(OPEN, LOOPBACK, MdnsPolicy(2.5)) == ()


async def test_two_that_started_at_once_discover_each_other(port: int) -> None:
    heard: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    first = await MdnsService.start(OPEN, heard.put, LOOPBACK)
    try:
        async with advertised(OPEN, port) as address:
            assert await asyncio.wait_for(heard.get(), 10) == (address,)
    finally:
        await first.close()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"network": b"home", "model": b"smollm2-135m"},
        {"network": b"home", "model": b"smollm2-135m", "d0": b"\xff\xfe"},
        {"network": b"home", "model": b"smollm2-135m", "d0": b"/ip4/10.0.0.1/tcp/1"},
        {"network": b"home", "model": b"smollm2-135m", "d0": b"nonsense\n" * 20},
        {"d0": b"x" * 200, "d1": b"y" * 200},
    ],
)
def test_what_makes_no_sense_says_nothing(values: dict[str, bytes]) -> None:
    assert not OPEN.decode(values)
    assert not PRIVATE.decode(values)


def test_a_private_swarm_announces_nothing_readable() -> None:
    address = f"/ip4/192.168.1.7/tcp/4001/p2p/{PEER}"
    values = PRIVATE.encode((address,) * 7)
    assert PRIVATE.decode(values) == (address,) * MAX_ADDRESSES
    announced = b"".join((*(key.encode() for key in values), *values.values()))
    for word in (b"home", b"smollm2", b"192.168", PEER.encode(), PEER[-8:].encode()):
        assert word not in announced
    assert all(len(key) + len(value) < 255 for key, value in values.items())
    assert PRIVATE.encode((address,)) != PRIVATE.encode((address,)), "and never the same twice"


async def test_a_flood_of_announcements_is_bounded() -> None:
    heard: list[tuple[str, ...]] = []

    async def note(addresses: tuple[str, ...]) -> None:
        heard.append(addresses)

    flooder, node = (
        AsyncZeroconf(interfaces=LOOPBACK),
        await MdnsService.start(OPEN, note, LOOPBACK, MdnsPolicy(max_announcements=3)),
    )
    try:
        for i in range(12):
            address = f"/ip4/127.0.0.1/tcp/{i + 1}/p2p/{PEER}"
            name = os.urandom(6).hex()
            info = ServiceInfo(
                SERVICE,
                f"{name}.{SERVICE}",
                port=1,
                properties=OPEN.encode((address,)),
                server=f"{name}.local.",
                addresses=[bytes([127, 0, 0, 1])],
            )
            await flooder.async_register_service(info, cooperating_responders=True)
        await asyncio.sleep(1.5)
        assert 0 < len(heard) <= 3
    finally:
        await node.close()
        await flooder.async_close()
