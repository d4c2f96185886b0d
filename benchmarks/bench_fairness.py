"""What a flood of work costs an honest client, and what fairness costs honest company, in virtual time.

    python benchmarks/bench_fairness.py [--seconds 10]

Three nodes of eight layers whose batches take the time of a cost curve; everything else is the real program. To compare
with another version, put its folders first in PYTHONPATH. The first table: one honest client's tokens/s, beside
attackers of one identity, or of many of one address block. The second: tokens/s of equal clients, all together.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path += [str(TESTS), str(TESTS / "e2e"), str(TESTS / "kernels")]

import torch  # noqa: E402
from flood_swarm import PREFILLS, SMALL, TOKENS, TREES, Attacker, Flood, Honest, costly_swarm, honest_rate  # noqa: E402
from memory_swarm import cut  # noqa: E402
from tiny_models import ModelTensors, tiny_model  # noqa: E402
from virtual_clock import run  # noqa: E402


async def flooded(source: Any, flood: Flood | None, identities: int, seconds: float) -> Honest:
    async with costly_swarm(source, cut(24, 8, 16)) as swarm, AsyncExitStack() as stack:
        for number in range(identities if flood else 0):
            sessions = 4 if identities == 1 else 1
            assert flood is not None  # or there would be no attackers
            await stack.enter_async_context(attacker(swarm, number, flood, sessions).run())
        await asyncio.sleep(1.0)
        return await honest_rate(swarm, seconds)


def attacker(swarm: Any, number: int, flood: Flood, sessions: int) -> Attacker:
    return Attacker(swarm, number, flood, sessions, "" if not hasattr(swarm.network, "hosts") else "8.8.8.8")


async def company(source: Any, clients: int, seconds: float, prompt: Sequence[int]) -> float:
    async with costly_swarm(source, cut(24, 8, 16)) as swarm:
        done = await asyncio.gather(*(honest_rate(swarm, seconds, i, prompt) for i in range(clients)))
        return float(sum(honest.rate for honest in done))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of virtual time, each")
    parser.add_argument("--identities", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = ModelTensors(tiny_model("llama", num_hidden_layers=24, max_position_embeddings=1024))
    alone = run(flooded(source, None, 0, args.seconds))
    print(f"| flood | identities | tokens/s | of {alone.rate:.1f} undisturbed |\n|---|---|---|---|")
    for flood in (TREES, PREFILLS, SMALL, TOKENS):
        for identities in (1, args.identities):
            got = run(flooded(source, flood, identities, args.seconds))
            if set(got.answers or ()) != set(alone.answers or ()):
                raise SystemExit("the tokens depend on the company")
            print(f"| {flood.name} | {identities} | {got.rate:.1f} | {got.rate / alone.rate:.0%} |", flush=True)
    print("\n| equal clients | prompt | tokens/s, all together |\n|---|---|---|")
    for clients in (2, 6):
        for length in (3, 200):
            prompt = [3 + i % 100 for i in range(length)]
            rate = run(company(source, clients, args.seconds, prompt))
            print(f"| {clients} | {length} tokens | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
