"""A swarm under load for minutes or hours: does memory grow, do descriptors, threads or tasks leak, does every answer
arrive?

    python benchmarks/soak.py --minutes 60            (make soak)

Starts a private swarm of real node processes and sends requests. Every few seconds it samples each node's memory (PSS),
descriptors, threads and asyncio tasks, and its own, where the clients are; after a warm-up it fits a line through the
memory. Prints progress every few minutes and one JSON object at the end; exit code 1 if memory grows by more than
the limit, if descriptors, threads or tasks climb, or if an answer is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from swarm.errors import SwarmError
from swarm_client import SwarmClient
from swarm_node.owner import control_socket

SAMPLE_S = 5.0
PROGRESS_S = 300.0
MAX_INCREASE = 4  # descriptors, threads or tasks more at the end than after the warm-up: something leaks
PROMPTS = ("Why is the sky blue?", "Name three rivers.", "Write a line about the sea.", "What is seven times eight?")


@dataclass
class Series:
    """Samples of one process over time."""

    at: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MiB, a node and its p2p daemon, or the clients' process
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)

    def sample(self, process: psutil.Process, family: Sequence[psutil.Process], tasks: int, now: float) -> None:
        self.at.append(now)
        self.memory.append(sum(p.memory_full_info().pss for p in family) / 2**20)
        self.descriptors.append(process.num_fds())
        self.threads.append(process.num_threads())
        self.tasks.append(tasks)

    def verdict(self, warm_up_s: float) -> dict[str, Any]:
        kept = [i for i, at in enumerate(self.at) if at >= warm_up_s]
        hours = [self.at[i] / 3600 for i in kept]
        third = max(1, len(kept) // 3)
        return {
            "memory_mib": round(self.memory[-1], 1),
            "memory_slope_mib_per_h": round(slope(hours, [self.memory[i] for i in kept]), 2),
            "descriptors": ends([self.descriptors[i] for i in kept], third),
            "threads": ends([self.threads[i] for i in kept], third),
            "tasks": ends([self.tasks[i] for i in kept], third),
        }


def ends(counts: Sequence[int], part: int) -> tuple[int, int]:
    """The most in the first and in the last `part` samples."""
    return max(counts[:part]), max(counts[-part:])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line."""
    n = len(x)
    if n < 2:
        return 0.0
    mx, my = sum(x) / n, sum(y) / n
    spread = sum((a - mx) ** 2 for a in x)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


async def load(
    peers: Sequence[str], model: str, clients: int, pause_s: float, until: float, counts: dict[str, int]
) -> None:
    """Send requests until `until` (monotonic seconds); clients reconnect every 20 answers, as users come and go."""

    async def one(number: int) -> None:
        while time.monotonic() < until:
            async with SwarmClient(model=model, peers=peers) as client:
                for turn in range(20):
                    if time.monotonic() >= until:
                        return
                    prompt = PROMPTS[(number + turn) % len(PROMPTS)]
                    try:
                        answer = await client.chat([{"role": "user", "content": prompt}], max_new_tokens=48)
                    except SwarmError as error:
                        counts["failures"] += 1
                        sys.stderr.write(f"{type(error).__name__}: {error}\n")
                        continue
                    counts["answers"] += 1
                    counts["tokens"] += len(answer.token_ids)
                    await asyncio.sleep(pause_s)

    await asyncio.gather(*(one(number) for number in range(clients)))


async def watch(pids: Sequence[int], begun: float, until: float, counts: dict[str, int]) -> list[Series]:
    """Of the nodes, and of this process, the clients', at the end."""
    series = {pid: Series() for pid in pids}
    clients, own = Series(), psutil.Process()
    news = begun
    while time.monotonic() < until:
        now = time.monotonic()
        tasks = {node.metrics.pid: node.metrics.tasks for node in await control_socket.find()}
        for pid, seen in series.items():
            node = psutil.Process(pid)
            family = [node, *node.children(recursive=True)]
            seen.sample(node, family, tasks.get(pid, seen.tasks[-1] if seen.tasks else 0), now - begun)
        clients.sample(own, [own], len(asyncio.all_tasks()), now - begun)
        if now >= news:
            news = now + PROGRESS_S
            memory = [round(seen.memory[-1], 1) for seen in (*series.values(), clients)]
            print(json.dumps({"minute": round((now - begun) / 60), **counts, "memory_mib": memory}), flush=True)
        await asyncio.sleep(SAMPLE_S)
    return [*series.values(), clients]


async def soak(ready: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    until = begun + 60 * options.minutes
    counts = {"answers": 0, "tokens": 0, "failures": 0}
    asking = load(ready["peers"][:1], ready["model"], options.clients, options.pause, until, counts)
    _, series = await asyncio.gather(asking, watch(ready["pids"], begun, until, counts))
    *nodes, clients = [seen.verdict(60 * options.warm_up) for seen in series]
    counted = [node[name] for node in nodes for name in ("descriptors", "threads", "tasks")]
    flat = all(last <= first + MAX_INCREASE for first, last in counted)
    steady = all(node["memory_slope_mib_per_h"] <= options.limit for node in nodes)
    return {"minutes": options.minutes, **counts, "nodes": nodes, "clients": clients, "flat": flat, "steady": steady}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=None, help="minutes [a third of the time]")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a client waits between two answers [0]")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=float, default=1.0, help="MiB an hour that a node may grow [1]")
    options = parser.parse_args()
    options.warm_up = options.minutes / 3 if options.warm_up is None else options.warm_up
    command = [
        sys.executable,
        "-m",
        "swarm_node.commands.cli",
        "local",
        "--nodes",
        str(options.nodes),
        "--model",
        options.model,
    ]
    command += ["--threads", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as swarm:
        try:
            assert swarm.stdout is not None
            ready = next((e for line in swarm.stdout if (e := json.loads(line))["event"] == "ready"), None)
            if ready is None:
                sys.exit("the swarm did not start")
            found = asyncio.run(soak(ready, options))
        finally:
            swarm.send_signal(signal.SIGTERM)
            swarm.wait(90)
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["flat"] and found["steady"] and not found["failures"] else 1)


if __name__ == "__main__":
    main()
