"""Does guessing hurt others? Tokens/s of four clients at once, guessing against plain decoding.

    python benchmarks/bench_busy.py [--hops 3] [--clients 4] [--apart-s 0.13] [--rounds 3] [--dtype bf16]

Real node processes on one machine without emulated delays: the worst case, for every row guessed in vain takes time
from the others. Free prose, where guesses are worth least, and a mix of requests. The clients begin `apart-s` after
each other, as strangers do; with 0 they decode in step and share every batch, which guesses then break up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import AsyncExitStack

import uvloop
from prompts import PROMPTS
from shaped_swarm import ShapedSwarm, equal_spans, far_client

from swarm_client import SwarmClient

LAYERS = 30
ARMS = {"plain": ("ngram", "sequential"), "look-up": ("ngram", "auto"), "shipped draft": ("shipped", "auto")}


async def together(clients: list[SwarmClient], prompts: list[str], strategy: str, args: argparse.Namespace) -> float:
    """-> tokens/s of all clients together, the first one's start to the last one's end."""

    async def one(number: int) -> int:
        await asyncio.sleep(args.apart_s * number)
        message = {"role": "user", "content": prompts[number % len(prompts)]}
        answer = await clients[number].chat([message], strategy=strategy, max_new_tokens=args.tokens)
        return len(answer.token_ids)

    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(number) for number in range(len(clients)))))
    return tokens / (time.perf_counter() - started)


async def measure(args: argparse.Namespace) -> None:
    prompts = list(PROMPTS.values())
    with ShapedSwarm(equal_spans(LAYERS, args.hops), args.delay_ms, dtype=args.dtype) as swarm:
        async with AsyncExitStack() as stack:
            clients: dict[str, list[SwarmClient]] = {}
            for draft in ("ngram", "shipped"):
                settings = {"draft": draft}
                made = [far_client(swarm.address, args.delay_ms, settings=settings) for _ in range(args.clients)]
                clients[draft] = [await stack.enter_async_context(client) for client in made]
                await together(clients[draft], ["Hello!"], "sequential", args)
            for name, asked in {"free prose": prompts[:1], "mixed": prompts}.items():
                speeds: dict[str, list[float]] = {arm: [] for arm in ARMS}
                for _ in range(args.rounds):
                    for arm, (draft, strategy) in ARMS.items():
                        speeds[arm].append(await together(clients[draft], asked, strategy, args))
                plain = statistics.median(speeds["plain"])
                for arm, rates in speeds.items():
                    rate, spread = statistics.median(rates), f"{min(rates):.0f}-{max(rates):.0f}"
                    print(f"| {name} | {arm} | {rate:.1f} | {spread} | {rate / plain:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--apart-s", type=float, default=0.13)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    print("| requests | guessing | tokens/s, all together | of the rounds | over plain |\n|---|---|---|---|---|")
    uvloop.run(measure(args))


if __name__ == "__main__":
    main()
