"""Does speculation slow down co-scheduled sessions? Tokens/s of four clients at once, against plain decoding.

    python benchmarks/bench_busy.py [--hops 3] [--clients 4] [--apart-s 0.13] [--rounds 3] [--dtype bf16]

Real node processes on one machine without emulated delays: the worst case, since every rejected row takes time
from the other sessions. Free prose, where drafts are accepted least, and a mix of requests. The clients start
`apart-s` after each other, as independent users do, and each sends its next request as soon as it has its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

import uvloop
from bench_speculation_virtual import MODEL, chain_costs, drafters, record
from emulated_swarm import ShapedSwarm, equal_spans, far_client
from prompts import PROMPTS
from virtual_chain import SpeculationSetup, simulate_together

from swarm_client import SwarmClient
from swarm_kernels.models.open import open_model

LAYERS = 30
ARMS = {"plain": ("ngram", "sequential"), "n-gram": ("ngram", "auto"), "bundled draft": ("bundled", "auto")}


async def together(clients: list[SwarmClient], prompts: list[str], strategy: str, args: argparse.Namespace) -> float:
    """-> tokens/s of all clients together, each sending request after request; the first second is not counted."""
    loop = asyncio.get_running_loop()
    begin = loop.time() + 1.0
    tokens = 0

    async def one(number: int) -> None:
        nonlocal tokens
        message = {"role": "user", "content": prompts[number % len(prompts)]}
        await asyncio.sleep(args.apart_s * number)
        while True:
            stream = clients[number].chat_stream([message], decoding=strategy, max_new_tokens=args.tokens)
            async with stream:
                async for piece in stream:
                    tokens += len(piece.token_ids) if loop.time() >= begin else 0

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0 + args.seconds), asyncio.TaskGroup() as group:
            for number in range(len(clients)):
                group.create_task(one(number))
    return tokens / float(args.seconds)


async def measure(args: argparse.Namespace) -> None:
    prompts = list(PROMPTS.values())
    with ShapedSwarm(equal_spans(LAYERS, args.hops), args.delay_ms, dtype=args.dtype) as swarm:
        async with AsyncExitStack() as stack:
            clients: dict[str, list[SwarmClient]] = {}
            for draft in ("ngram", "bundled"):
                settings = {"drafter": draft}
                made = [far_client(swarm.address, args.delay_ms, settings=settings) for _ in range(args.clients)]
                clients[draft] = [await stack.enter_async_context(client) for client in made]
                for client in clients[draft]:
                    await client.chat([{"role": "user", "content": "Hello!"}], max_new_tokens=4)
            for name, requests in {"free prose": prompts[:1], "mixed": prompts}.items():
                speeds: dict[str, list[float]] = {arm: [] for arm in ARMS}
                for _ in range(args.rounds):
                    for arm, (draft, strategy) in ARMS.items():
                        speeds[arm].append(await together(clients[draft], requests, strategy, args))
                report(name, speeds)


def virtual(args: argparse.Namespace) -> None:
    source = open_model(MODEL)
    costs = chain_costs(LAYERS, args.hops, args.delay_ms)
    answers = [answer for _, answer in record(source, args.tokens, fresh=False)]
    recorded = [(list(answer.prompt), list(answer.answer)) for answer in answers]
    for name, texts in {"free prose": recorded[:1] * args.clients, "mixed": recorded * args.clients}.items():
        speeds = {}
        for arm, (draft, strategy) in ARMS.items():
            drafter, draft_ms = drafters(source, draft, answers)
            setup = SpeculationSetup(None if strategy == "sequential" else drafter, draft_ms=draft_ms)
            requests = texts[: args.clients]
            together = partial(simulate_together, costs, requests, setup, seconds=args.seconds, cores=os.cpu_count())
            speeds[arm] = [together(apart_ms=1e3 * args.apart_s)]
        report(name, speeds)


def report(name: str, speeds: Mapping[str, list[float]]) -> None:
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
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--virtual", action="store_true", help="in virtual time, in fp32, on this machine's cores")
    args = parser.parse_args()
    print("| requests | drafter | tokens/s, all together | range over rounds | over plain |\n|---|---|---|---|---|")
    if args.virtual:
        virtual(args)
    else:
        uvloop.run(measure(args))


if __name__ == "__main__":
    main()
