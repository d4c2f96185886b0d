"""The directory on real DHT nodes on 127.0.0.1, and what strangers try to do to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from swarm.net.daemon_streams import DaemonCarrier
from swarm.net.directory import DhtDirectory
from swarm.net.identity import Identity
from swarm.net.p2pd import DaemonOptions

Member = tuple[DaemonCarrier, DhtDirectory]


@contextlib.asynccontextmanager
async def swarm(size: int, clients: int = 0) -> AsyncIterator[list[Member]]:
    async with contextlib.AsyncExitStack() as stack:
        members: list[Member] = []
        for i in range(size + clients):
            peers = members[0][0].addresses if members else ()
            carrier = await DaemonCarrier.start(Identity.generate(), DaemonOptions(peers=peers))
            stack.push_async_callback(carrier.close)
            directory = await DhtDirectory.start(carrier, peers, client=i >= size)
            stack.push_async_callback(directory.close)
            members.append((carrier, directory))
        yield members


async def test_three_nodes_and_a_client_see_one_map() -> None:
    async with swarm(3, clients=1) as members:
        soon = time.time() + 10
        for i, (_, directory) in enumerate(members[:3]):
            await directory.publish(b"record %d" % i, "m", soon)
        everyone = {carrier.peer: b"record %d" % i for i, (carrier, _) in enumerate(members[:3])}
        for _, directory in members:
            assert await directory.read("m") == everyone
        (carrier, directory), (_, other), (_, client) = members[0], members[1], members[3]
        for round_ in range(3):  # a refresh replaces, even one with the same expiry
            await directory.publish(b"again %d" % round_, "m", soon)
            assert (await other.read("m"))[carrier.peer] == b"again %d" % round_
        await directory.withdraw("m")
        await directory.withdraw("m")
        assert carrier.peer not in await client.read("m")
        assert len(await client.read("m")) == 2
        await directory.publish(b"back", "m", soon)
        assert (await client.read("m"))[carrier.peer] == b"back"
        assert await client.read("another model") == {}
