"""p2p daemons killed under real nodes: how soon another one stands, and how soon the swarm reads a new record.

    python tests/chaos/process_daemons.py [--rounds 20]

Two nodes and a client that looks at the map once a second; each round kills the daemon of one node, in turn. Used by
`make chaos`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from process_chaos import private_home
from process_swarm import NodeProcess, ProcessSwarm

from swarm.types import LayerSpan
from swarm_client import SwarmClient

POLL_S = 0.05
GIVE_UP_S = 30.0
QUIET_S = 5.0  # between two rounds


def daemons(node: NodeProcess) -> list[psutil.Process]:
    return [child for child in node.children() if child.name().startswith("p2pd")]


async def once(node: NodeProcess, client: SwarmClient) -> tuple[float, float]:
    """Seconds until another daemon runs, and until the client reads a record that was published after that."""
    victim, wall, begun = daemons(node)[0], time.time(), time.monotonic()
    victim.kill()
    up: float | None = None
    while time.monotonic() - begun < GIVE_UP_S:
        if up is None and any(child.pid != victim.pid for child in daemons(node)):
            up = time.monotonic() - begun
        if up is not None:
            seen = (await client.snapshot()).node(node.peer)
            if seen is not None and seen.published_at > wall + up:
                return up, time.monotonic() - begun
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"node {node.number} was not back within {GIVE_UP_S:.0f} s (another daemon after {up} s)")


async def run(home: Path, rounds: int) -> list[tuple[float, float]]:
    spans = [LayerSpan(0, 15), LayerSpan(15, 30)]
    async with ProcessSwarm(home, spans, replicas=1) as swarm, SwarmClient(peers=swarm.addresses) as client:
        found = []
        for number in range(rounds):
            await client.snapshot()
            await asyncio.sleep(QUIET_S)
            found.append(await once(swarm.nodes[number % 2], client))
            print(f"{number + 1:4d} up after {found[-1][0]:.2f} s, read again after {found[-1][1]:.2f} s", flush=True)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(private_home(Path(folder)), options.rounds))
    for what, times in zip(("another daemon up", "a new record read"), zip(*found, strict=True), strict=True):
        print(f"{what}: {statistics.median(times):.2f} s in the middle, {max(times):.2f} s at most, of {len(times)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
