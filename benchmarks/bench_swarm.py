"""A swarm of 1, 2 and 3 real node processes against transformers' `generate`, same machine, same weights, one run.

    python benchmarks/bench_swarm.py [--dtype bf16] [--tokens 128] [--rounds 3] [--nodes 1 2 3]

Prints a table and, with --json FILE, writes the figures. Each round measures transformers and the swarm one after
the other, so that a machine that speeds up or slows down changes both; the ratio of a round is what counts and the
median over the rounds is what is printed. The nodes stay up, idle, while transformers runs. Speculation is off
(`--decoding sequential`) and no prompt comes twice, so that both sides do the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import LocalSwarm, reference_model, tree_pss_mb
from transformers import PreTrainedModel

from swarm.config import ClientConfig
from swarm_client import SwarmClient
from swarm_kernels.models.open import open_model

SHORT, LONG = 51, 1000  # prompt tokens
CLIENTS = 4


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds. Ratios are taken round by round, swarm over transformers."""

    nodes: int
    dtype: str
    transformers_tokens_s: float
    swarm_tokens_s: float
    tokens_s_ratio: float
    transformers_ttft_s: float
    swarm_ttft_s: float
    ttft_ratio: float
    concurrent_tokens_s: float
    concurrent_ratio: float  # CLIENTS at once over one alone
    node_pss_mb: float  # the largest node, its p2p daemon included
    serving_after_s: float  # the slowest node, from process start
    tokens_equal: int  # leading tokens equal to transformers' own


def prompt(length: int, number: int = 0) -> list[int]:
    """A fixed prompt of ordinary tokens; the same every run, another for every `number`."""
    generator = torch.Generator().manual_seed(length + 100_000 * number)
    return torch.randint(1000, 40000, (length,), generator=generator).tolist()


@torch.no_grad()
def run_transformers(model: PreTrainedModel, tokens: int, number: int) -> tuple[float, float, list[int]]:
    """-> (tokens/s after the first, seconds to the first token of the long prompt, the tokens)."""
    begun = time.perf_counter()
    model.generate(torch.tensor([prompt(LONG, number)]), max_new_tokens=1, do_sample=False)
    ttft = time.perf_counter() - begun
    ids = torch.tensor([prompt(SHORT, number)])
    begun = time.perf_counter()
    model.generate(ids, max_new_tokens=1, do_sample=False)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    seconds = time.perf_counter() - begun - first
    return (tokens - 1) / seconds, ttft, out[0, SHORT:].tolist()


async def run_swarm(client: SwarmClient, tokens: int, number: int) -> tuple[float, float, list[int]]:
    long = await client.generate(prompt(LONG, number), max_new_tokens=1)
    short = await client.generate(prompt(SHORT, number), max_new_tokens=tokens)
    return short.tokens_per_second, long.time_to_first_token_s, list(short.token_ids)


async def run_concurrent(client: SwarmClient, tokens: int, number: int) -> float:
    """Tokens a second of all clients together, prompts included."""
    begun = time.perf_counter()
    answers = await asyncio.gather(
        *(client.generate(prompt(SHORT + 1 + i, number), max_new_tokens=tokens) for i in range(CLIENTS))
    )
    return sum(len(a.token_ids) for a in answers) / (time.perf_counter() - begun)


async def measure(model: PreTrainedModel, nodes: int, args: argparse.Namespace) -> Figures:
    rounds: list[dict[str, float]] = []
    equal = 0
    with LocalSwarm(nodes, dtype=args.dtype) as swarm:
        config = ClientConfig(peers=(swarm.address,), decoding="sequential")
        async with SwarmClient(config=config) as client:
            await run_swarm(client, 8, 99)  # warm both sides
            run_transformers(model, 8, 99)
            for number in range(args.rounds):
                theirs, their_ttft, expected = run_transformers(model, args.tokens, number)
                ours, our_ttft, got = await run_swarm(client, args.tokens, number)
                alone = time.perf_counter()
                single = await client.generate(prompt(SHORT - 1, number), max_new_tokens=args.tokens)
                alone = len(single.token_ids) / (time.perf_counter() - alone)
                together = await run_concurrent(client, args.tokens, number)
                equal = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(got))
                rounds.append(
                    {
                        "transformers_tokens_s": theirs,
                        "swarm_tokens_s": ours,
                        "tokens_s_ratio": ours / theirs,
                        "transformers_ttft_s": their_ttft,
                        "swarm_ttft_s": our_ttft,
                        "ttft_ratio": our_ttft / their_ttft,
                        "concurrent_tokens_s": together,
                        "concurrent_ratio": together / alone,
                    }
                )
        pss = max(tree_pss_mb(pid) for pid in swarm.node_pids)
    medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    return Figures(
        nodes, args.dtype, node_pss_mb=pss, serving_after_s=swarm.serving_after_s, tokens_equal=equal, **medians
    )


def table(figures: list[Figures]) -> str:
    head = (
        "| nodes | dtype | tokens/s (transformers) | ratio | TTFT 1000, s (transformers) | ratio "
        f"| {CLIENTS} clients, tokens/s | over one | MB a node | serving after, s | tokens equal |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    rows = [
        f"| {f.nodes} | {f.dtype} | {f.swarm_tokens_s:.1f} ({f.transformers_tokens_s:.1f}) | {f.tokens_s_ratio:.2f} "
        f"| {f.swarm_ttft_s:.2f} ({f.transformers_ttft_s:.2f}) | {f.ttft_ratio:.2f} | {f.concurrent_tokens_s:.1f} "
        f"| {f.concurrent_ratio:.2f} | {f.node_pss_mb:.0f} | {f.serving_after_s:.1f} | {f.tokens_equal} |"
        for f in figures
    ]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(os.cpu_count() or 1)
    model = reference_model(open_model("smollm2-135m"), torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    figures = [asyncio.run(measure(model, n, args)) for n in args.nodes]
    print(f"\nSmolLM2-135M-Instruct, {args.tokens} greedy tokens, {os.cpu_count()} cores, {torch.__version__}\n")
    print(table(figures))
    if args.json:
        args.json.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
