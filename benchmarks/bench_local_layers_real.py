"""What it costs a client to hold the ends of the built-in model: real processes, four nodes over emulated links.

    python benchmarks/bench_local_layers_real.py [--delays 0 20] [--rounds 8] [--tokens 24]

Each client is a process of its own, with one thread, on the machine of the nodes, so that at 0 ms all of them share its
cores. All clients run for the whole time and take turns, an answer each a round, after one that is not counted. Median
and quickest answer: other load of the machine makes answers slower and never quicker. Memory is the process's most
(VmHWM), CPU its time for the counted answers by their tokens. The tokens of all clients must be equal, or the run
fails. "none" is a client that holds nothing.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from emulated_swarm import ShapedSwarm, equal_spans, far_client

HOPS, LAYERS = 4, 30
SHARES = ("none", "0:0", "1:1", "2:2", "4:2")
BASE = "0:0"
PROMPT = "The lighthouse keeper wrote down every ship that passed, and on the last day of the year he"


async def serve_answers(address: str, delay_ms: float, share: str, tokens: int) -> None:
    """In a client's own process: an answer for each line of stdin, as a JSON line."""
    settings = {"local_layers": share, "audits": "off", "drafter": "ngram"}
    options: dict[str, Any] = {"max_new_tokens": tokens, "decoding": "sequential", "ignore_eos": True}
    loop = asyncio.get_running_loop()
    async with far_client(address, delay_ms, settings=settings) as client:
        while beginning := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            begun = time.process_time()
            one = await client.generate(f"{beginning} {PROMPT}", **options)
            told = {"tokens": list(one.token_ids), "speed": one.tokens_per_second, "first_s": one.time_to_first_token_s}
            told |= {"cpu_ms": (time.process_time() - begun) * 1e3 / tokens, "memory_mib": _most_memory_mib()}
            print(json.dumps(told), flush=True)


def _most_memory_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


class Client:
    """A client's process."""

    def __init__(self, address: str, delay_ms: float, share: str, tokens: int) -> None:
        command = [sys.executable, __file__, "--client", address, "--delays", str(delay_ms), "--share", share]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, "--tokens", str(tokens)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, beginning: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{beginning}\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def table(delay_ms: float, rounds: int, tokens: int) -> str:
    runs: dict[str, list[dict[str, Any]]] = {share: [] for share in SHARES}
    with ShapedSwarm(equal_spans(LAYERS, HOPS), delay_ms, dtype="bf16") as swarm, ExitStack() as stack:
        clients = {share: Client(swarm.address, delay_ms, share, tokens) for share in SHARES}
        for client in clients.values():
            stack.callback(client.close)
            client.answer("0.")
        for number in range(1, rounds + 1):  # another beginning each time: no prefix is cached
            told = {share: client.answer(f"{number}.") for share, client in clients.items()}
            if len({json.dumps(one["tokens"]) for one in told.values()}) > 1:
                raise SystemExit(f"the tokens differ: {told}")
            for share, one in told.items():
                runs[share].append(one)
    lines = [
        f"{HOPS} nodes, {delay_ms:g} ms a link one way, {rounds} rounds of {tokens} tokens",
        "| held | tokens/s, median (quickest) | over (0, 0), median (quickest) | first token, s, median (quickest)"
        " | client's CPU, ms a token | client's memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    base = [one["speed"] for one in runs[BASE]]
    for share, of in runs.items():
        speeds, firsts = ([one[key] for one in of] for key in ("speed", "first_s"))
        cpu_ms, mib = (statistics.median(one[key] for one in of) for key in ("cpu_ms", "memory_mib"))
        speed = statistics.median(speeds)
        over = f"{speed / statistics.median(base):.3f} ({max(speeds) / max(base):.3f})"
        lines.append(
            f"| {share} | {speed:.2f} ({max(speeds):.2f}) | {over}"
            f" | {statistics.median(firsts):.3f} ({min(firsts):.3f}) | {cpu_ms:.1f} | {mib:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--share", default=BASE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        asyncio.run(serve_answers(args.client, args.delays[0], args.share, args.tokens))
        return
    for delay_ms in args.delays:
        print(table(delay_ms, args.rounds, args.tokens), flush=True)


if __name__ == "__main__":
    main()
