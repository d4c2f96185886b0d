"""What a flood of work costs an honest client, and what fairness costs honest company, in virtual time.

    python benchmarks/bench_fairness.py [--seconds 10]

Three nodes of eight layers whose batches take the time of a cost curve; everything else is the real program. Each row
is measured twice in this run: with one queue for everybody, first come, first served, and with the shares that nodes
have. The first table: one honest client's tokens/s beside attackers of one identity, or of many of one address block.
The second: tokens/s of equal clients, all together.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path += [str(TESTS), str(TESTS / "e2e"), str(TESTS / "kernels")]

import torch  # noqa: E402
from flood_swarm import (  # noqa: E402
    PREFILLS,
    SMALL,
    TOKENS,
    TREES,
    Attacker,
    Flood,
    Honest,
    OneQueue,
    costly_swarm,
    honest_rate,
)
from memory_swarm import cut  # noqa: E402
from tiny_models import ModelTensors, tiny_model  # noqa: E402
from virtual_clock import run  # noqa: E402

from swarm_hop.sharing.shares import SharePlaces  # noqa: E402

Places = Callable[[], SharePlaces]
PUBLIC, LOCAL, RELAYED = "8.8.8.8", "192.168.1.7", ""  # the honest client is relayed


async def flooded(source: Any, places: Places, flood: Flood | None, hosts: Sequence[str], seconds: float) -> Honest:
    """`hosts`: of the identities of the attacker."""
    async with costly_swarm(source, cut(24, 8, 16), places) as swarm, AsyncExitStack() as stack:
        for number, host in enumerate(hosts):
            sessions = 4 if len(hosts) == 1 else 1
            assert flood is not None  # or there would be no attackers
            await stack.enter_async_context(Attacker(swarm, number, flood, sessions, host).run())
        await asyncio.sleep(1.0)
        return await honest_rate(swarm, seconds)


async def company(source: Any, places: Places, clients: int, seconds: float, prompt: Sequence[int]) -> float:
    async with costly_swarm(source, cut(24, 8, 16), places) as swarm:
        done = await asyncio.gather(*(honest_rate(swarm, seconds, i, prompt) for i in range(clients)))
        return float(sum(honest.rate for honest in done))


def floods(source: Any, identities: int, seconds: float) -> None:
    alone = run(flooded(source, SharePlaces, None, (), seconds))
    print(f"One honest client alone: {alone.rate:.1f} tokens/s.\n")
    print("| flood | identities | one queue | shares |\n|---|---|---|---|")
    for name, hosts in (
        ("1", [PUBLIC]),
        (f"{identities} of one public block", [PUBLIC] * identities),
        (f"{identities} of one local address", [LOCAL] * identities),
        (f"{identities} relayed like the honest one", [RELAYED] * identities),
    ):
        for flood in (TREES, PREFILLS, SMALL, TOKENS):
            cells = []
            for places in (OneQueue, SharePlaces):
                got = run(flooded(source, places, flood, hosts, seconds))
                if not set(got.answers or ()) <= set(alone.answers or ()):
                    raise SystemExit("the tokens depend on the company")
                cells.append(f"{got.rate:.1f} ({got.rate / alone.rate:.0%})")
            print(f"| {flood.name} | {name} | {' | '.join(cells)} |", flush=True)


def equals(source: Any, seconds: float) -> None:
    print("\n| equal clients | prompt | one queue | shares |\n|---|---|---|---|")
    for clients in (2, 6):
        for length in (3, 200):
            prompt = [3 + i % 100 for i in range(length)]
            queue, shares = (run(company(source, p, clients, seconds, prompt)) for p in (OneQueue, SharePlaces))
            print(f"| {clients} | {length} tokens | {queue:.1f} | {shares:.1f} ({shares / queue:.0%}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of virtual time, each")
    parser.add_argument("--identities", type=int, default=16)
    parser.add_argument("--equals", action="store_true", help="only the table of equal clients")
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = ModelTensors(tiny_model("llama", num_hidden_layers=24, max_position_embeddings=1024))
    if not args.equals:
        floods(source, args.identities, args.seconds)
    equals(source, args.seconds)


if __name__ == "__main__":
    main()
