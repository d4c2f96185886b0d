"""What floods of connections and control frames cost a node and the honest peers on it, with its budgets and without.

A node's transport, pool and session server run in a process of their own; an honest peer, which counts as one with a
session, pings it from here; the attacker is a third process on the same address. Figures: round trip of the honest
pings, the node's share of a core, its memory and descriptors, each against the same node undisturbed.

    python benchmarks/bench_connection_floods.py [--seconds 6] [--attacks opens,headers]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from swarm.config import Limits
from swarm.errors import NetworkError
from swarm.messages import AnyMessage, OpenSession, Ping, ProgressQuery
from swarm.net.base.half_open import HandshakePolicy
from swarm.net.base.transport import TransportPolicy
from swarm.net.pool.connection_pool import ConnectionPool, PoolPolicy
from swarm.net.pool.eviction import EvictionPolicy
from swarm.net.pool.frame_budgets import FrameBudgetPolicy
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.security.identity import Identity
from swarm.net.transports.tls import TlsTransport
from swarm.types import ModelId

HONEST = Identity.from_seed(bytes(32))
MANY = 1e12
UNBOUNDED_TRANSPORT = TransportPolicy(
    max_connections=4096,
    handshakes=HandshakePolicy(MANY, MANY, MANY, MANY, 4096, 4096, timeout_s=5.0, refusals_per_s=MANY),
)
UNBOUNDED_POOL = PoolPolicy(
    eviction=EvictionPolicy(4096, 4096),
    budgets=FrameBudgetPolicy(MANY, MANY, MANY, MANY, MANY, MANY, MANY, MANY, unasked_rate=MANY, unasked_burst=MANY),
)


# The node ------------------------------------------------------------------------------------------------------------


async def run_node(bounded: bool) -> None:
    limits = Limits() if bounded else Limits(max_connections=4096, max_protocol_errors=1 << 30)
    transport = await TlsTransport.start(
        Identity.generate(), ["127.0.0.1"], policy=TransportPolicy() if bounded else UNBOUNDED_TRANSPORT
    )
    from swarm_hop.serving.session_server import SessionServer  # slow to import, and for the node alone

    servers: list[SessionServer] = []

    async def on_frame(link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        await servers[0].on_frame(link, message, body)

    async def on_lost(link: MigratableLink, error: NetworkError) -> None:
        await servers[0].on_lost(link, error)

    policy = PoolPolicy() if bounded else UNBOUNDED_POOL
    pool = ConnectionPool(transport, on_frame, on_lost, limits, policy, uses=lambda peer: peer == HONEST.peer)
    async with pool, SessionServer(ModelId("toy", "hash", "fp32"), pool, limits) as server:
        servers.append(server)
        await pool.serve()
        print(json.dumps({"peer": transport.peer, "address": transport.addresses[0]}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


# The attacker --------------------------------------------------------------------------------------------------------


async def hold_half_open(peer: str, address: str) -> None:
    port, held = int(address.split("/")[4]), []
    while True:
        raw = socket.socket()
        raw.setblocking(False)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        held.append(raw)
        if len(held) > 1000:
            held.pop(0).close()
        await asyncio.sleep(0.001)


async def dial_anew(peer: str, address: str) -> None:
    """A new identity for every connection, four at a time; idle ones stay open."""
    held: list[Any] = []

    async def dial() -> None:
        while True:
            transport = await TlsTransport.start(Identity.generate(), policy=UNBOUNDED_TRANSPORT)
            with contextlib.suppress(NetworkError):
                held.append((transport, await transport.dial(peer, (address,))))

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(dial())


def flood(message: AnyMessage, connections: int = 4) -> Callable[[str, str], Awaitable[None]]:
    """As fast as it goes, over connections of several identities, which are made anew when they end."""

    async def send(peer: str, address: str) -> None:
        while True:
            transport = await TlsTransport.start(Identity.generate())
            with contextlib.suppress(NetworkError):
                connection = await transport.dial(peer, (address,))
                reading = asyncio.create_task(read(connection))
                try:
                    while True:
                        await connection.send(message)
                        await asyncio.sleep(0)
                finally:
                    reading.cancel()
            await transport.close()

    async def read(connection: Any) -> None:
        with contextlib.suppress(NetworkError):
            while True:
                await connection.receive()

    async def run(peer: str, address: str) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(send(peer, address))

    return run


_WRONG = OpenSession(bytes(16), "another model", "hash", "fp32", 0, 1, 10)
ATTACKS: dict[str, Callable[[str, str], Awaitable[None]]] = {
    "half-open": hold_half_open,
    "identities": dial_anew,
    "opens": flood(_WRONG),
    "headers": flood(OpenSession(bytes(16), "another model", "hash", "fp32", 0, 1, 10, history=[70_000] * (1 << 18))),
    "queries": flood(ProgressQuery(bytes(16))),
    "pings": flood(Ping(1)),
}


# Measuring -----------------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def measure(pool: ConnectionPool, peer: str, address: str, pid: int, seconds: float) -> dict[str, float]:
    trips: list[float] = []
    memory = files = 0.0
    cpu, began = cpu_s(pid), time.perf_counter()
    while time.perf_counter() - began < seconds:
        try:
            trips.append(await pool.rtt(peer, (address,), 5.0))
        except NetworkError:
            trips.append(5000.0)
        memory, files = max(memory, memory_mb(pid)), max(files, descriptors(pid))
        await asyncio.sleep(0.02)
    spent = (cpu_s(pid) - cpu) / (time.perf_counter() - began)
    trips.sort()
    at = trips[int(0.95 * (len(trips) - 1))]
    return {"p50_ms": statistics.median(trips), "p95_ms": at, "core": spent, "mb": memory, "files": files}


async def compare(attack: str, bounded: bool, seconds: float) -> None:
    script = [sys.executable, __file__, "--role"]
    node = subprocess.Popen(  # noqa: ASYNC220
        [*script, "node", *([] if bounded else ["--unbounded"])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert node.stdout is not None
    assert node.stdin is not None
    said = json.loads(node.stdout.readline())
    transport = await TlsTransport.start(HONEST)

    async def ignore(link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        return None

    async with ConnectionPool(transport, ignore) as pool:
        where = said["peer"], said["address"], node.pid
        before = await measure(pool, *where, seconds / 2)
        attacker = subprocess.Popen(  # noqa: ASYNC220
            [*script, attack, "--peer", said["peer"], "--address", said["address"]], stderr=subprocess.DEVNULL
        )
        await asyncio.sleep(2.0)
        during = await measure(pool, *where, seconds)
        attacker.kill()
        attacker.wait()
        await asyncio.sleep(2.0)
        after = await measure(pool, *where, seconds / 2)
    await transport.close()
    node.stdin.close()
    node.wait()
    label = "budgets" if bounded else "without"
    print(
        f"{attack:11} {label}: ping p50 {before['p50_ms']:.1f} -> {during['p50_ms']:.1f} ms, "
        f"p95 {before['p95_ms']:.1f} -> {during['p95_ms']:.1f} ms, core {before['core']:.0%} -> {during['core']:.0%}, "
        f"memory {during['mb'] - before['mb']:+.0f} MB, descriptors {during['files'] - before['files']:+.0f}; "
        f"2 s later p50 {after['p50_ms']:.1f} ms",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--role", default="")
    parser.add_argument("--peer", default="")
    parser.add_argument("--address", default="")
    parser.add_argument("--unbounded", action="store_true")
    options = parser.parse_args()
    if options.role == "node":
        await run_node(not options.unbounded)
    elif options.role:
        await ATTACKS[options.role](options.peer, options.address)
    else:
        for attack in options.attacks.split(","):
            for bounded in (False, True):
                await compare(attack, bounded, options.seconds)


if __name__ == "__main__":
    asyncio.run(main())
