"""What hostile records cost a reader: `python benchmarks/bench_record_flood.py [--records 10000] [--seconds 30]`.

A reader with twelve honest nodes looks at the swarm once a second while the directory also shows it thousands of
well-signed records of made-up nodes, all of them new at every look. Prints the share of one core that the reader takes
(CPU time by time passed), the longest that the event loop was held, and whether any honest node was out of sight; for
comparison, what verifying all of them takes, as it was before there was a book of records.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

from swarm import records
from swarm.errors import PeerUnreachable
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordChannel, RecordExchange
from swarm.net.gossip.record_reader import RecordReader
from swarm.net.pool.violations import ProtocolViolations
from swarm.net.security.identity import Identity, public_key, verify
from swarm.types import CostCurve, LayerSpan, NodeProfile, NodeState, PeerId

MODEL, LAYERS, HONEST = "model", 30, 12
TICK_S = 0.001


class _NoPool:
    """A pool without links."""

    def __init__(self) -> None:
        self.violations = ProtocolViolations(8)
        self.peer: PeerId = ""
        self.dialled: tuple[PeerId, ...] = ()

    async def get(self, peer: PeerId, addresses: object = (), timeout_s: float | None = None) -> RecordChannel:
        raise PeerUnreachable("nobody is asked here")

    async def drop(self, peer: PeerId, reason: str = "") -> None:
        raise NotImplementedError


class _FloodedDirectory:
    """All records of one look; `prepare` makes the next ones, off the clock."""

    def __init__(self) -> None:
        self.found: dict[PeerId, bytes] = {}

    async def read(self, model: str) -> dict[PeerId, bytes]:
        return self.found

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        raise NotImplementedError


def record_of(identity: Identity, at: float) -> bytes:
    address = f"/ip4/203.0.113.7/tcp/4001/p2p/{identity.peer}"
    profile = NodeProfile(
        identity.peer,
        "node",
        NodeState.SERVING,
        "bf16",
        "ab" * 16,
        LAYERS,
        LayerSpan(0, LAYERS),
        (address, address),
        (1.0,) * LAYERS,
        CostCurve((1, 4, 16, 64), (0.2, 0.3, 0.6, 2.0)),
        published_at=at,
    )
    return records.encode(profile, MODEL, LAYERS, 12.0, identity.sign)[0]


class _LoopWatch:
    """The CPU time of this thread that passes between two turns of the event loop: what others had to wait."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - before)
            await asyncio.sleep(TICK_S)


async def measure(count: int, seconds: int) -> dict[str, float | int | str]:
    honest = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(1, HONEST + 1)]
    hostile = [Identity.from_seed((10_000 + number).to_bytes(32, "big")) for number in range(count)]
    directory, pool, clock = _FloodedDirectory(), _NoPool(), [1_700_000_000.0]
    book = RecordBook(MODEL, LAYERS, verify, random.Random(1))
    reader = RecordReader(book, directory, pool, RecordExchange(), wall_clock=lambda: clock[0])
    cpu: list[float] = []
    watch, stale, hidden = _LoopWatch(), 0, 0
    directory.found = {one.peer: record_of(one, clock[0]) for one in honest}
    await reader.snapshot()
    watching = asyncio.create_task(watch.run())
    for _ in range(seconds):
        clock[0] += 1.0
        found = {one.peer: record_of(one, clock[0]) for one in [*hostile, *honest]}
        directory.found = found
        public_key.cache_clear()
        await asyncio.sleep(0)
        watch.longest_s, longest = 0.0, watch.longest_s if cpu else 0.0
        before = time.thread_time()
        snapshot = await reader.snapshot()
        cpu.append(time.thread_time() - before)
        watch.longest_s = max(longest, watch.longest_s)
        seen = {node.peer: node.published_at for node in snapshot.nodes}
        stale += sum(seen.get(one.peer) != clock[0] for one in honest)
        hidden += sum(one.peer not in seen for one in honest)
    watching.cancel()
    before = time.thread_time()
    records.to_snapshot(directory.found, MODEL, clock[0], verify, LAYERS)
    unbounded = time.thread_time() - before
    await reader.close()
    return {
        "records": count,
        "looks, one a second": seconds,
        "share of a core": round(sum(cpu) / seconds, 4),
        "share of a core, after the first ten": round(sum(cpu[10:]) / max(1, len(cpu) - 10), 4),
        "longest hold of the event loop, ms": round(watch.longest_s * 1e3, 1),
        "honest nodes out of sight": hidden,
        "honest records not of this second": stale,
        "records kept": len(book),
        "share of a core, each verified": round(unbounded, 3),
        "ratio": round(unbounded / (sum(cpu) / seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=30)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.records, given.seconds)), indent=1))


if __name__ == "__main__":
    main()
