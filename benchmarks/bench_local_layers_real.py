"""What it costs a client to hold the ends of the built-in model: real processes, four nodes over emulated links.

    python benchmarks/bench_local_layers_real.py [--delays 0 20] [--rounds 3] [--tokens 48]

Each client is a process of its own, with one thread, on the machine of the nodes, so that at 0 ms all of them share its
cores. The shares take turns, round by round, after one answer that is not counted; medians, and the least and most
tokens/s beside them. Memory is the process's most (VmHWM), CPU its time for the counted answers by their tokens. The
tokens of all answers must be equal, or the run fails. "none" is a client that holds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from emulated_swarm import ShapedSwarm, equal_spans, far_client

HOPS, LAYERS = 4, 30
SHARES = ("none", "0:0", "1:1", "2:2", "4:2")
BASE = "0:0"
PROMPT = "The lighthouse keeper wrote down every ship that passed, and on the last day of the year he"


async def answers(address: str, delay_ms: float, share: str, tokens: int, count: int) -> dict[str, Any]:
    """In a client's own process: one answer, then `count` that are measured."""
    settings = {"local_layers": share, "audits": "off", "drafter": "ngram"}
    options: dict[str, Any] = {"max_new_tokens": tokens, "decoding": "sequential", "ignore_eos": True}
    async with far_client(address, delay_ms, settings=settings) as client:
        await client.generate(PROMPT, **options)
        begun = time.process_time()
        # another beginning each time: no prefix is cached
        read = [await client.generate(f"{i}. {PROMPT}", **options) for i in range(count)]
        cpu_ms = (time.process_time() - begun) * 1e3 / (tokens * count)
    return {
        "tokens": [list(one.token_ids) for one in read],
        "speed": [one.tokens_per_second for one in read],
        "first_s": [one.time_to_first_token_s for one in read],
        "cpu_ms": cpu_ms,
        "memory_mib": _most_memory_mib(),
    }


def _most_memory_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def client(address: str, delay_ms: float, share: str, tokens: int, count: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--client", address, "--delays", str(delay_ms), "--share", share]
    command += ["--tokens", str(tokens), "--answers", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def table(delay_ms: float, rounds: int, tokens: int, count: int) -> str:
    runs: dict[str, list[dict[str, Any]]] = {share: [] for share in SHARES}
    with ShapedSwarm(equal_spans(LAYERS, HOPS), delay_ms, dtype="bf16") as swarm:
        for _ in range(rounds):
            for share in SHARES:
                runs[share].append(client(swarm.address, delay_ms, share, tokens, count))
    if len({json.dumps(one["tokens"]) for of in runs.values() for one in of}) > 1:
        raise SystemExit("the tokens differ")
    lines = [
        f"{HOPS} nodes, {delay_ms:g} ms a link one way, {rounds} rounds of {count} answers of {tokens} tokens",
        "| held | tokens/s, median (least to most) | over (0, 0) | first token, s | client's CPU, ms a token"
        " | client's memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    base = statistics.median(speed for one in runs[BASE] for speed in one["speed"])
    for share, of in runs.items():
        speeds = [speed for one in of for speed in one["speed"]]
        first_s = statistics.median(s for one in of for s in one["first_s"])
        cpu_ms, mib = (statistics.median(one[key] for one in of) for key in ("cpu_ms", "memory_mib"))
        speed = statistics.median(speeds)
        lines.append(
            f"| {share} | {speed:.2f} ({min(speeds):.2f} to {max(speeds):.2f}) | {speed / base:.3f} | {first_s:.3f}"
            f" | {cpu_ms:.1f} | {mib:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--answers", type=int, default=2, help="of each client that count")
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--share", default=BASE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        told = asyncio.run(answers(args.client, args.delays[0], args.share, args.tokens, args.answers))
        print(json.dumps(told))
        return
    for delay_ms in args.delays:
        print(table(delay_ms, args.rounds, args.tokens, args.answers), flush=True)


if __name__ == "__main__":
    main()
