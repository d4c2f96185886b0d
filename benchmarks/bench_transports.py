"""The transports between two processes in one run: round trips, throughput, and tokens/s of a 3-node swarm with each.

    python benchmarks/bench_transports.py [--rounds 5] [--no-swarm] [--tokens 128] [--json FILE]

Every round measures all transports one after the other, so that a machine that speeds up or slows down changes all of
them; what counts is the ratio to the p2p daemon's stream, taken round by round, of which the median is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import uvloop

from swarm.config import ClientConfig, load
from swarm.errors import NetworkError
from swarm.messages import CloseSession, DropInFlight, Ping, Pong
from swarm.net.base.transport import Connection, Transport
from swarm.net.security.identity import Identity
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.net.transports.tls import TlsTransport

SIZES = {"1 KB": 1 << 10, "16 KB": 16 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "16 MB": 16 << 20}
ROUND_TRIPS = {"1 KB": 400, "16 KB": 300, "256 KB": 100, "4 MB": 12, "16 MB": 5}
FLOOD = 256 << 20  # bytes sent for one throughput figure, fewer where frames are small
SLOWDOWN = 8  # times fewer bytes and round trips for a slow transport
FLOOD_FRAMES = 4000
TRANSPORTS = ("daemon", "py", "direct")  # p2p daemon, py-libp2p, TLS in our own loop
SWARMS = {  # the settings of node and client for each
    "daemon": {"transport": "libp2p", "libp2p_impl": "go"},
    "py": {"transport": "libp2p", "libp2p_impl": "python"},
    "direct": {"transport": "auto", "libp2p_impl": "go"},
}
SESSION = bytes(16)


async def make(kind: str, listen: bool) -> Transport:
    if kind != "direct":
        return await Libp2pTransport.start(Identity.generate(), libp2p_impl="python" if kind == "py" else "go")
    return await TlsTransport.start(Identity.generate(), ["127.0.0.1"] if listen else [])


async def answer(connection: Connection) -> None:
    """Echo a CloseSession with its body, ignore a DropInFlight, answer a Ping."""
    with suppress(NetworkError):
        while True:
            message, body = await connection.receive()
            if isinstance(message, CloseSession):
                await connection.send(message, body)
            elif isinstance(message, Ping):
                await connection.send(Pong(message.nonce))


async def listener() -> None:
    """The other process: prints where it listens and runs until its stdin ends."""
    async with AsyncExitStack() as stack:
        endpoints: dict[str, tuple[str, list[str]]] = {}
        for kind in TRANSPORTS:
            transport = await make(kind, listen=True)
            stack.push_async_callback(transport.close)
            await transport.serve(answer)
            endpoints[kind] = transport.peer, list(transport.addresses)
        print(json.dumps(endpoints), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def round_trip_ms(connection: Connection, size: str, share: int = 1) -> float:
    """Median of the time in which a frame goes there and comes back whole."""
    body = os.urandom(SIZES[size])
    times: list[float] = []
    for _ in range(max(2, ROUND_TRIPS[size] // share)):
        begun = time.perf_counter()
        await connection.send(CloseSession(SESSION), body)
        await connection.receive()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


async def throughput_mb_s(connection: Connection, size: str, share: int = 1) -> float:
    """MB (10^6 bytes) a second one way, as many frames in flight as the transport takes."""
    body = os.urandom(SIZES[size])
    frames = max(2, min(FLOOD_FRAMES, FLOOD // len(body)) // share)
    begun = time.perf_counter()
    for _ in range(frames):
        await connection.send(DropInFlight(SESSION, 0), body)
    await connection.send(Ping(0))
    await connection.receive()
    return frames * len(body) / (time.perf_counter() - begun) / 1e6


async def measure_links(rounds: int) -> list[dict[str, object]]:
    """-> one row a size and transport."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--listener", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        endpoints = json.loads(await child.stdout.readline())
        async with AsyncExitStack() as stack:
            connections: dict[str, Connection] = {}
            for kind in TRANSPORTS:
                transport = await make(kind, listen=False)
                stack.push_async_callback(transport.close)
                connections[kind] = await transport.dial(*endpoints[kind])
            for connection in connections.values():  # warm both sides
                await round_trip_ms(connection, "256 KB")
            return [row for size in SIZES for row in await _measure_size(connections, size, rounds)]
    finally:
        assert child.stdin is not None
        child.stdin.close()  # ends it
        await child.wait()


async def _measure_size(connections: dict[str, Connection], size: str, rounds: int) -> list[dict[str, object]]:
    rtt: dict[str, list[float]] = {kind: [] for kind in connections}
    rate: dict[str, list[float]] = {kind: [] for kind in connections}
    for _ in range(rounds):
        for kind, connection in connections.items():
            rtt[kind].append(await round_trip_ms(connection, size, SLOWDOWN if kind == "py" else 1))
        for kind, connection in connections.items():
            rate[kind].append(await throughput_mb_s(connection, size, SLOWDOWN if kind == "py" else 1))
    return [
        {
            "size": size,
            "transport": kind,
            "rtt_ms": statistics.median(rtt[kind]),
            "mb_s": statistics.median(rate[kind]),
            "rtt_speedup": statistics.median(d / own for d, own in zip(rtt["daemon"], rtt[kind], strict=True)),
            "rate_speedup": statistics.median(own / d for d, own in zip(rate["daemon"], rate[kind], strict=True)),
        }
        for kind in connections
    ]


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def measure_swarm(rounds: int, tokens: int) -> dict[str, float]:
    """Tokens/s of one greedy generation over three node processes, for each of SWARMS; medians.

    All swarms stay up; the generations alternate.
    """
    from harness import LocalSwarm

    from swarm_client import SwarmClient

    found: dict[str, list[float]] = {kind: [] for kind in SWARMS}
    async with AsyncExitStack() as stack:
        clients: dict[str, SwarmClient] = {}
        for kind, setting in SWARMS.items():
            with environment(SWARM_TRANSPORT=setting["transport"], SWARM_LIBP2P=setting["libp2p_impl"]):
                swarm = stack.enter_context(LocalSwarm(3))
            config = load(ClientConfig, {"peers": (swarm.address,), **setting})
            clients[kind] = await stack.enter_async_context(SwarmClient(config=config))
            await clients[kind].generate("Once upon a time", max_new_tokens=16)
        for _ in range(rounds):
            for kind, client in clients.items():
                answer = await client.generate("Once upon a time", max_new_tokens=tokens)
                found[kind].append(answer.tokens_per_second)
    return {kind: statistics.median(values) for kind, values in found.items()}


def table(rows: list[dict[str, object]]) -> str:
    head = "| size | transport | RTT, ms | MB/s one way | RTT, times faster | MB/s, times |\n|---|---|---|---|---|---|"
    lines = [
        f"| {r['size']} | {r['transport']} | {r['rtt_ms']:.3f} | {r['mb_s']:.0f} "
        f"| {r['rtt_speedup']:.2f} | {r['rate_speedup']:.2f} |"
        for r in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--no-swarm", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--listener", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.listener:
        uvloop.run(listener())
        return
    rows = uvloop.run(measure_links(args.rounds))
    print(f"\nTwo processes on loopback, {os.cpu_count()} cores, {args.rounds} rounds\n\n{table(rows)}")
    speeds = {} if args.no_swarm else uvloop.run(measure_swarm(args.rounds, args.tokens))
    if speeds:
        print(f"\nThree node processes, {args.tokens} greedy tokens\n\n| transport | tokens/s |\n|---|---|")
        print("\n".join(f"| {kind} | {speed:.1f} |" for kind, speed in speeds.items()))
    if args.json:
        args.json.write_text(json.dumps({"links": rows, "tokens_s": speeds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
