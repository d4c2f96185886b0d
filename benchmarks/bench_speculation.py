"""Tokens/s of each strategy over sequential: real node processes, emulated one-way delays, five kinds of requests.

    python benchmarks/bench_speculation.py [--hops 4] [--delays 0 5 20 50] [--tokens 64] [--json FILE]

Every node is a process of one thread and `delay` ms from every other and from the client. All strategies answer each
request in turn, greedily, in fp32, repeatedly until that has taken `--seconds` each; the median of
the speeds counts. A request's tokens must be the same under all of them, or the run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from emulated_swarm import ShapedSwarm, equal_spans, far_client
from prompts import PROMPTS

from swarm_client import GenerationResult, SwarmClient
from swarm_client.api.options import STRATEGIES
from swarm_client.speculation.drafter_factory import BUNDLED
from swarm_kernels.models.open import open_model

MODEL = "smollm2-135m"
MAX_TURNS = 5


@dataclass(frozen=True)
class Cell:
    hops: int
    delay_ms: float
    prompt: str
    strategy: str
    used: str  # what auto ended with
    tokens_per_s: float
    ratio: float  # over sequential
    tokens_per_step: float
    rows_per_token: float
    top1_acceptance: float
    sent_kb: float  # by all nodes, a token


async def measure(hops: int, delay_ms: float, args: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    layers = open_model(MODEL).config.num_layers
    with ShapedSwarm(equal_spans(layers, hops), delay_ms) as swarm:
        async with far_client(swarm.address, delay_ms, settings={"drafter": args.drafter}) as client:
            await ask(client, "Hello!", "sequential", 8)  # connections, caches
            for name, prompt in PROMPTS.items():
                turns = await take_turns(swarm, client, prompt, args)
                plain = turns["sequential"]
                for strategy, turn in turns.items():
                    if any(answer.token_ids != plain.answers[0].token_ids for answer in turn.answers):
                        raise RuntimeError(f"{strategy} changed the answer to '{name}'")
                    cells.append(cell(hops, delay_ms, name, strategy, turn, plain.tokens_per_s))
                    print(line(cells[-1]), flush=True)
    return cells


class Turns:
    """One strategy's answers to one request, and the bytes that all nodes sent for each."""

    def __init__(self) -> None:
        self.answers: list[GenerationResult] = []
        self.sent: list[int] = []

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(answer.tokens_per_second for answer in self.answers)

    def enough(self, seconds: float) -> bool:
        took_s = sum(len(answer.token_ids) / answer.tokens_per_second for answer in self.answers)
        return len(self.answers) == MAX_TURNS or took_s >= seconds


async def take_turns(
    swarm: ShapedSwarm, client: SwarmClient, prompt: str, args: argparse.Namespace
) -> dict[str, Turns]:
    turns = {strategy: Turns() for strategy in ("sequential", *args.strategies)}
    while waiting := [strategy for strategy, turn in turns.items() if not turn.enough(args.seconds)]:
        for strategy in waiting:
            before = await swarm.sent_bytes()
            answer = await ask(client, prompt, strategy, args.tokens)
            turns[strategy].answers.append(answer)
            turns[strategy].sent.append(await swarm.sent_bytes() - before)
    return turns


async def ask(client: SwarmClient, prompt: str, strategy: str, tokens: int) -> GenerationResult:
    return await client.chat([{"role": "user", "content": prompt}], decoding=strategy, max_new_tokens=tokens)


def cell(hops: int, delay_ms: float, name: str, strategy: str, turn: Turns, plain: float) -> Cell:
    answer = turn.answers[-1]
    stats, tokens = answer.speculation or {}, len(answer.token_ids)
    return Cell(
        hops,
        delay_ms,
        name,
        strategy,
        answer.strategy,
        turn.tokens_per_s,
        turn.tokens_per_s / plain if plain else 0.0,
        stats.get("tokens_per_step", 1.0),
        stats.get("rows", 0) / tokens,
        stats["acceptance"][0][0] if stats else 0.0,
        turn.sent[-1] / tokens / 1e3,
    )


def line(c: Cell) -> str:
    return (
        f"| {c.hops} | {c.delay_ms:g} | {c.prompt} | {c.strategy} | {c.tokens_per_s:.1f} | {c.ratio:.2f} | {c.used} "
        f"| {c.tokens_per_step:.2f} | {c.rows_per_token:.1f} | {c.top1_acceptance:.2f} "
        f"| {c.sent_kb:.1f} |"
    )


def summary(cells: list[Cell]) -> str:
    lines = ["", "Mean ratio over sequential:", "", "| hops | delay, ms | strategy | all five | extraction, rewrite |"]
    lines.append("|---|---|---|---|---|")
    keys = dict.fromkeys((c.hops, c.delay_ms, c.strategy) for c in cells if c.strategy != "sequential")
    for hops, delay, strategy in keys:
        mine = [c for c in cells if (c.hops, c.delay_ms, c.strategy) == (hops, delay, strategy)]
        every = statistics.geometric_mean(c.ratio for c in mine)
        copies = statistics.geometric_mean(c.ratio for c in mine if c.prompt in ("extraction", "rewrite"))
        lines.append(f"| {hops} | {delay:g} | {strategy} | {every:.2f} | {copies:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, nargs="+", default=[4])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0, 20.0, 50.0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help=f"per strategy, request; {MAX_TURNS} turns max")
    parser.add_argument("--strategies", nargs="+", default=["auto", "tree", "pipedec"], choices=STRATEGIES)
    parser.add_argument("--drafter", default=BUNDLED, help="the drafter beside the n-gram drafter; ngram: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = f"{os.cpu_count()} cores, one thread a node"
    print(f"SmolLM2-135M-Instruct, fp32, {args.tokens} greedy tokens, drafter {args.drafter}, {machine}\n")
    print(
        "| hops | delay, ms | request | strategy | tokens/s | over sequential | used | tokens/step | rows/token |",
        end="",
    )
    print(" top-1 acceptance | kB sent/token |\n|---|---|---|---|---|---|---|---|---|---|---|")
    cells: list[Cell] = []
    for hops in args.hops:
        for delay in args.delays:
            cells += uvloop.run(measure(hops, delay, args))
    print(summary(cells))
    if args.json:
        args.json.write_text(json.dumps([asdict(c) for c in cells], indent=2) + "\n")


if __name__ == "__main__":
    main()
