"""What it costs a client to hold the ends of the model: four node processes over emulated links, clients in turn.

    OMP_NUM_THREADS=1 python benchmarks/bench_local_layers.py [--delays 0 20] [--rounds 5] [--tokens 48]

Prints one table a delay (one way, ms, every link). Each round asks the same prompt of every client, one after the
other, in an order that rotates; ratios are taken round by round to the client with (0, 0); medians are printed, and the
worst round of the ratio. "none" is a client that holds nothing. Decoding is sequential, no prompt comes twice. Tokens
must be equal, or the run fails. Memory is the weights held, CPU that of the client's process while its answer is
written: it waits for the others otherwise. Every process computes with one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch
from emulated_swarm import ShapedSwarm, equal_spans, far_client

from swarm_client import SwarmClient

PROMPT = 200  # tokens
LAYERS = 30
HOPS = 4
SHARES = ("none", "0:0", "1:1", "2:2", "4:2")
BASE = "0:0"


@dataclass(frozen=True)
class Sample:
    tokens_s: float
    first_s: float
    cpu_ms: float  # of this process, for each token of the answer
    tokens: tuple[int, ...]


def prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1000, 40000, (PROMPT,), generator=generator).tolist()


async def sample(client: SwarmClient, number: int, tokens: int) -> Sample:
    before = _cpu_s()
    answer = await client.generate(prompt(number), max_new_tokens=tokens, decoding="sequential", ignore_eos=True)
    spent_ms = (_cpu_s() - before) * 1e3
    return Sample(answer.tokens_per_second, answer.time_to_first_token_s, spent_ms / tokens, answer.token_ids)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(delay_ms: float, rounds: int, tokens: int, dtype: str) -> str:
    samples: dict[str, list[Sample]] = {share: [] for share in SHARES}
    held: dict[str, float] = {}
    with ShapedSwarm(equal_spans(LAYERS, HOPS), delay_ms, dtype=dtype) as swarm:
        async with AsyncExitStack() as stack:
            clients = {}
            for share in SHARES:
                settings = {"local_layers": share, "audits": "off"}
                clients[share] = await stack.enter_async_context(far_client(swarm.address, delay_ms, settings=settings))
                home = clients[share].home
                held[share] = home.weight_bytes / 2**20 if home is not None else 0.0
            for share in SHARES:
                await sample(clients[share], 10_000, 8)
            for number in range(rounds):
                turn = number % len(SHARES)
                for share in (*SHARES[turn:], *SHARES[:turn]):
                    samples[share].append(await sample(clients[share], number, tokens))
                answers = {samples[share][-1].tokens for share in SHARES}
                if len(answers) > 1 and dtype == "fp32":
                    raise SystemExit(f"the tokens differ in round {number}: {answers}")
    return table(delay_ms, samples, held)


def table(delay_ms: float, samples: dict[str, list[Sample]], held: dict[str, float]) -> str:
    lines = [
        f"{HOPS} hops, {delay_ms:g} ms a link one way, {len(samples[BASE])} rounds",
        "| held | tokens/s | over (0, 0): median, worst | first token, s | client CPU, ms a token | weights, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for share, own in samples.items():
        ratios = [mine.tokens_s / base.tokens_s for mine, base in zip(own, samples[BASE], strict=True)]
        lines.append(
            f"| {share} | {_median(own, 'tokens_s'):.2f} | {statistics.median(ratios):.3f}, {min(ratios):.3f} "
            f"| {_median(own, 'first_s'):.2f} | {_median(own, 'cpu_ms'):.1f} | {held[share]:.0f} |"
        )
    return "\n".join(lines)


def _median(samples: Sequence[Sample], field: str) -> float:
    return statistics.median(getattr(one, field) for one in samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="fp32")
    args = parser.parse_args()
    for delay_ms in args.delays:
        print(asyncio.run(measure(delay_ms, args.rounds, args.tokens, args.dtype)), flush=True)


if __name__ == "__main__":
    main()
