"""What watching a swarm costs a gateway: share of one core, with readers of `/swarm/events` and a change a second.

    python benchmarks/bench_gateway_view.py [--nodes 1000] [--readers 10] [--layers 80] [--seconds 20]

Each second a fifth of the nodes publish new figures, a few move, leave and join: what a busy swarm of that size does.
Lines, in this process's CPU time:

    view      of a gateway that does nothing else, over HTTP to all readers (in a process of their own): the share of
              one core that changes, JSON, and sending them take
    directory decoding and verifying all records, which happens once a second: the client's snapshot, which it reads
              for routes too while answers are written
    first     ms of CPU to build and encode the whole overview, which every new reader gets
    bytes     of a change, and of the whole overview
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from swarm.net.security.identity import Identity, verify
from swarm.overview import SwarmOverview
from swarm.records import encode, to_snapshot
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_gateway.server.app import create_app
from swarm_gateway.server.run import http_server, listen
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel

CHANGED_SHARE, MOVED_SHARE, LEFT_SHARE = 0.2, 0.005, 0.005  # of the nodes, a second
LINKS = 24


class ChangingSwarm:
    """A SnapshotSource. Its own work (`made_s`, CPU seconds) is no part of the view's."""

    def __init__(self, peers: Sequence[str], num_layers: int) -> None:
        self.made_s = 0.0
        self.looks = 0
        self.asked = asyncio.Event()
        self.peers = list(peers)
        self.rng = random.Random(1)
        self.num_layers = num_layers
        self.nodes = {peer: self.profile(peer) for peer in peers}

    def profile(self, peer: str) -> NodeProfile:
        rng = self.rng
        length = rng.randint(1, self.num_layers // 4)
        start = rng.randint(0, self.num_layers - length)
        return NodeProfile(
            peer=peer,
            name=f"node of {peer[-6:]}",
            state=NodeState.SERVING,
            dtype="bf16",
            weight_hash="0" * 32,
            layer_capacity=length,
            span=LayerSpan(start, start + length),
            layer_ms=(rng.uniform(0.3, 3.0),) * length,
            kv_capacity_tokens=65536,
            kv_free_tokens=rng.randrange(65536),
            sessions=rng.randrange(16),
            region=rng.choice(("eu-west", "us-east", "asia")),
            link_ms={other: rng.uniform(1, 100) for other in rng.sample(self.peers, min(LINKS, len(self.peers)))},
            version="1.0.0",
            published_at=time.time(),
        )

    def go_on(self) -> None:
        rng, gone = self.rng, [peer for peer in self.peers if peer not in self.nodes]
        for peer in gone:
            self.nodes[peer] = self.profile(peer)
        present = sorted(self.nodes)
        for peer in rng.sample(present, int(CHANGED_SHARE * len(present))):
            sessions, free = rng.randrange(16), rng.randrange(65536)
            self.nodes[peer] = replace(
                self.nodes[peer], published_at=time.time(), sessions=sessions, kv_free_tokens=free
            )
        for peer in rng.sample(present, int(MOVED_SHARE * len(present))):
            self.nodes[peer] = self.profile(peer)
        for peer in rng.sample(present, int(LEFT_SHARE * len(present))):
            del self.nodes[peer]

    async def snapshot(self) -> Snapshot:
        begun = time.process_time()
        self.go_on()
        nodes = tuple(self.nodes[peer] for peer in sorted(self.nodes))
        made = Snapshot("model", self.num_layers, nodes, time.time())
        self.made_s += time.process_time() - begun
        self.looks += 1
        self.asked.set()
        return made


async def read_events(port: int, seconds: float) -> tuple[int, int, int]:
    """One reader over HTTP. -> changes, their mean bytes, bytes of the overview."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(b"GET /swarm/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    changes, whole, name = [], 0, b""
    try:
        async with asyncio.timeout(seconds):
            while line := await reader.readline():
                if line.startswith(b"event: "):
                    name = line.strip()
                elif line.startswith(b"data: ") and name == b"event: change":
                    changes.append(len(line))
                elif line.startswith(b"data: "):
                    whole = len(line)
    except TimeoutError:
        writer.close()
    return len(changes), sum(changes) // max(1, len(changes)), whole


async def read_all(port: int, readers: int, seconds: float) -> None:
    """The readers' process: its time is not the gateway's."""
    print(json.dumps(await asyncio.gather(*(read_events(port, seconds) for _ in range(readers)))))


async def view_share(swarm: ChangingSwarm, readers: int, seconds: float) -> tuple[float, list[list[int]]]:
    """-> share of a core of a gateway that does nothing else, and what each reader got."""
    started = asyncio.Event()
    gateway = Gateway([ServedModel("model", swarm)])  # type: ignore[arg-type]
    server = http_server(create_app(gateway), started.set)
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        await started.wait()
        flags = ["--read", str(listener.getsockname()[1]), "--readers", str(readers), "--seconds", str(seconds + 3)]
        child = await asyncio.create_subprocess_exec(sys.executable, __file__, *flags, stdout=PIPE)
        await swarm.asked.wait()  # somebody reads
        await asyncio.sleep(2.0)
        cpu, made, looks = time.process_time(), swarm.made_s, swarm.looks
        await asyncio.sleep(seconds - 1)
        used = time.process_time() - cpu - (swarm.made_s - made)
        share = used / (swarm.looks - looks)  # seconds of CPU for a change, of which there is one a second
        out, _ = await child.communicate()
        server.should_exit = True
        await serving
    return share, json.loads(out)


def directory_s(swarm: ChangingSwarm, identities: Sequence[Identity], repeat: int = 3) -> tuple[float, float]:
    """CPU seconds to read every record: when all are new, and when all signatures are known."""
    now = time.time()
    profiles = [replace(swarm.profile(identity.peer), published_at=now) for identity in identities]
    signed = zip(profiles, identities, strict=True)
    records = {p.peer: encode(p, "model", swarm.num_layers, 60.0, identity.sign)[0] for p, identity in signed}
    best = {True: float("inf"), False: float("inf")}
    for new in (True, False) * repeat:
        if new:
            verify.cache_clear()
        begun = time.process_time()
        snapshot = to_snapshot(records, "model", now, verify)
        best[new] = min(best[new], time.process_time() - begun)
        if len(snapshot.nodes) != len(identities):
            raise SystemExit(f"{len(snapshot.nodes)} of {len(identities)} records are valid")
    return best[True], best[False]


def first_ms(snapshot: Snapshot) -> float:
    best = float("inf")
    for _ in range(5):
        begun = time.process_time()
        msgspec.json.encode(SwarmOverview.of(snapshot, time.time()))
        best = min(best, time.process_time() - begun)
    return best * 1e3


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--read", type=int, default=0, help=argparse.SUPPRESS)  # the port, in the readers' process
    args = parser.parse_args()
    if args.read:
        await read_all(args.read, args.readers, args.seconds)
        return
    identities = [Identity.generate() for _ in range(args.nodes)]
    swarm = ChangingSwarm([str(identity.peer) for identity in identities], args.layers)
    gc.collect()
    share, readings = await view_share(swarm, args.readers, args.seconds)
    changes, change_bytes, whole_bytes = readings[0]
    if any(count < args.seconds / 2 for count, _, _ in readings):
        raise SystemExit("a reader missed changes: this machine is too busy to measure")
    print(f"{args.nodes} nodes, {args.layers} layers, {args.readers} readers, {changes} changes each")
    print(f"view       {share:.1%} of a core")
    new_s, known_s = directory_s(swarm, identities)
    print(
        f"directory  {new_s * 1e3:.0f} ms of CPU to read the records if all are new, {known_s * 1e3:.0f} ms if none is"
    )
    print(f"first      {first_ms(await swarm.snapshot()):.0f} ms of CPU")
    print(f"bytes      {change_bytes} a change, {whole_bytes} the whole")


if __name__ == "__main__":
    asyncio.run(main())
