"""What it costs a client to hold the ends of the model: four hops over emulated links, clients in turn, one process.

    PYTHONPATH=tests:tests/e2e python benchmarks/bench_local_layers.py [--delays 0 20] [--rounds 5] [--tokens 48]

Real nodes, spans and clients on a network in memory with real time: frames are encoded and delayed, not encrypted. Each
round asks the same prompt of every client, one after the other, in an order that rotates; ratios are taken round by
round to the client with (0, 0); medians are printed, and the worst round of the ratio. "none" is a client that holds
nothing. Decoding is sequential, no prompt comes twice. Tokens must be equal in fp32, or the run fails. What the client
computes is what its own two hops report of each token; memory is the weights that it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch
from memory_swarm import cut, memory_swarm

from swarm.config import DEFAULT_MODEL
from swarm.testing.memory_network import LinkModel
from swarm_client import SwarmClient
from swarm_hop.serving.compute_device import ThreadDevice
from swarm_kernels.models.open import open_model

PROMPT = 200  # tokens
HOPS = 4
SHARES = ("none", "0:0", "1:1", "2:2", "4:2")
BASE = "0:0"


@dataclass(frozen=True)
class Sample:
    tokens_s: float
    first_s: float
    home_ms: float  # what the hops at home compute for a token
    tokens: tuple[int, ...]


def prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1000, 40000, (PROMPT,), generator=generator).tolist()


async def sample(client: SwarmClient, number: int, tokens: int) -> Sample:
    answer = await client.generate(prompt(number), max_new_tokens=tokens, decoding="sequential", ignore_eos=True)
    home_ms = sum(answer.hop_ms[at][1] for at in (0, -1)) if client.home is not None else 0.0
    return Sample(answer.tokens_per_second, answer.time_to_first_token_s, home_ms, answer.token_ids)


async def measure(delay_ms: float, rounds: int, tokens: int, dtype: str) -> str:
    samples: dict[str, list[Sample]] = {share: [] for share in SHARES}
    held: dict[str, float] = {}
    source = open_model(DEFAULT_MODEL)
    layers = source.config.num_layers
    borders = [round(i * layers / HOPS) for i in range(1, HOPS)]
    async with AsyncExitStack() as stack:
        link = LinkModel(delay_s=delay_ms / 1e3)
        swarm = await stack.enter_async_context(memory_swarm(source, cut(layers, *borders), link, dtype))
        device = ThreadDevice()
        for node in swarm.nodes.values():
            for span in node.service.served_spans:
                span.executor._device, span.executor._clock = device, time.perf_counter  # not in virtual time
        clients: dict[str, SwarmClient] = {}
        for number, share in enumerate(SHARES):
            client = swarm.client(number, local_layers=share, drafter="ngram")
            clients[share] = await stack.enter_async_context(client)
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
    source.close()
    return table(delay_ms, samples, held)


def table(delay_ms: float, samples: dict[str, list[Sample]], held: dict[str, float]) -> str:
    lines = [
        f"{HOPS} hops, {delay_ms:g} ms a link one way, {len(samples[BASE])} rounds",
        "| held | tokens/s | over (0, 0): median, worst | first token, s | at home, ms a token | weights, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for share, own in samples.items():
        ratios = [mine.tokens_s / base.tokens_s for mine, base in zip(own, samples[BASE], strict=True)]
        lines.append(
            f"| {share} | {_median(own, 'tokens_s'):.2f} | {statistics.median(ratios):.3f}, {min(ratios):.3f} "
            f"| {_median(own, 'first_s'):.2f} | {_median(own, 'home_ms'):.1f} | {held[share]:.0f} |"
        )
    return "\n".join(lines)


def _median(samples: Sequence[Sample], field: str) -> float:
    return float(statistics.median(getattr(one, field) for one in samples))


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
