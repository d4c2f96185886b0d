"""The universal carrier on real p2p daemons on 127.0.0.1: the shared conformance suite, its errors, its process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil
from carrier_conformance import SMALL, Conformance, echo

from swarm.messages import Ping
from swarm.net.carrier import Carrier
from swarm.net.daemon_streams import DaemonCarrier
from swarm.net.identity import Identity
from swarm.net.p2pd import DaemonOptions


class TestDaemon(Conformance):
    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Carrier, Carrier]]:
        caller, listener = await asyncio.gather(
            DaemonCarrier.start(Identity.generate()), DaemonCarrier.start(Identity.generate(), limits=SMALL)
        )
        children = [caller.daemon_pid, listener.daemon_pid]
        try:
            yield caller, listener
        finally:
            await asyncio.gather(caller.close(), listener.close())
        assert not any(psutil.pid_exists(pid) for pid in children)


@contextlib.contextmanager
def no_child_left() -> AsyncIterator[None]:
    before = {child.pid for child in psutil.Process().children()}
    yield
    left = [child for child in psutil.Process().children() if child.pid not in before]
    assert not left


async def test_join_and_dial_by_id_alone() -> None:
    first = await DaemonCarrier.start(Identity.generate())
    await first.serve(echo)
    second = await DaemonCarrier.start(Identity.generate(), DaemonOptions(peers=first.addresses))
    connection = await second.dial(first.peer)
    await connection.send(Ping(1))
    assert (await connection.receive())[0] == Ping(1)
    await asyncio.gather(first.close(), second.close())
