"""Tokens/s of each strategy over sequential: real node processes, emulated one-way delays, five kinds of requests.

    python benchmarks/bench_speculation.py [--hops 4] [--delays 0 5 20 50] [--tokens 64] [--fresh] [--json FILE]

Every node is a process of one thread and `delay` ms from every other and from the client. All strategies answer each
request in turn, greedily, in fp32, repeatedly until that has taken `--seconds` each; the median of
the speeds counts. A request's tokens must be the same under all of them, or the run fails. `--drafters` are compared
within one run, on `--fresh` prompts or on those of `prompts.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from emulated_swarm import ShapedSwarm, equal_spans, far_client
from fresh_prompts import FRESH_PROMPTS
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
    kind: str  # of request
    drafter: str
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
        async with AsyncExitStack() as stack:
            clients = {
                drafter: await stack.enter_async_context(
                    far_client(swarm.address, delay_ms, settings={"drafter": drafter})
                )
                for drafter in args.drafters
            }
            for client in clients.values():
                for strategy in ("sequential", "auto"):  # connections, caches, the drafter
                    await ask(client, "Hello!", strategy, 24)
            for kind, prompt in requests(args.fresh):
                turns = await take_turns(swarm, clients, prompt, args)
                plain = turns[args.drafters[0], "sequential"]
                for (drafter, strategy), turn in turns.items():
                    if any(answer.token_ids != plain.answers[0].token_ids for answer in turn.answers):
                        raise RuntimeError(f"{strategy} with {drafter} changed the answer to '{prompt[:60]}'")
                    cells.append(cell(hops, delay_ms, kind, drafter, strategy, turn, plain.tokens_per_s))
                    print(line(cells[-1]), flush=True)
    return cells


def requests(fresh: bool) -> list[tuple[str, str]]:
    """(kind, prompt)"""
    if not fresh:
        return list(PROMPTS.items())
    return [(kind, prompt) for kind, prompts in FRESH_PROMPTS.items() for prompt in prompts]


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
    swarm: ShapedSwarm, clients: dict[str, SwarmClient], prompt: str, args: argparse.Namespace
) -> dict[tuple[str, str], Turns]:
    """By drafter and strategy; plain decoding with the first client."""
    turns = {(args.drafters[0], "sequential"): Turns()}
    turns |= {(drafter, strategy): Turns() for drafter in clients for strategy in args.strategies}
    while waiting := [key for key, turn in turns.items() if not turn.enough(args.seconds)]:
        for drafter, strategy in waiting:
            before = await swarm.sent_bytes()
            answer = await ask(clients[drafter], prompt, strategy, args.tokens)
            turns[drafter, strategy].answers.append(answer)
            turns[drafter, strategy].sent.append(await swarm.sent_bytes() - before)
    return turns


async def ask(client: SwarmClient, prompt: str, strategy: str, tokens: int) -> GenerationResult:
    return await client.chat([{"role": "user", "content": prompt}], decoding=strategy, max_new_tokens=tokens)


def cell(hops: int, delay_ms: float, kind: str, drafter: str, strategy: str, turn: Turns, plain: float) -> Cell:
    answer = turn.answers[-1]
    stats, tokens = answer.speculation or {}, len(answer.token_ids)
    return Cell(
        hops,
        delay_ms,
        kind,
        Path(drafter).name,
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
        f"| {c.hops} | {c.delay_ms:g} | {c.kind} | {c.drafter} | {c.strategy} | {c.tokens_per_s:.1f} | {c.ratio:.2f} "
        f"| {c.used} | {c.tokens_per_step:.2f} | {c.rows_per_token:.1f} | {c.top1_acceptance:.2f} "
        f"| {c.sent_kb:.1f} |"
    )


def summary(cells: list[Cell]) -> str:
    """Over sequential by kind of request: the geometric mean, the median and the worst."""
    kinds = list(dict.fromkeys(c.kind for c in cells))
    lines = ["", "Over sequential, geometric mean / median / worst (tokens a step):", ""]
    lines += [f"| hops | delay, ms | drafter | strategy | all | {' | '.join(kinds)} |", "|---" * (len(kinds) + 5) + "|"]
    keys = dict.fromkeys((c.hops, c.delay_ms, c.drafter, c.strategy) for c in cells if c.strategy != "sequential")
    for key in keys:
        mine = [c for c in cells if (c.hops, c.delay_ms, c.drafter, c.strategy) == key]
        parts = [mine, *([c for c in mine if c.kind == kind] for kind in kinds)]
        lines.append("| " + " | ".join([*map(str, key), *map(_spread, parts)]) + " |")
    return "\n".join(lines)


def _spread(cells: list[Cell]) -> str:
    ratios = [c.ratio for c in cells]
    middle = f"{statistics.geometric_mean(ratios):.2f} / {statistics.median(ratios):.2f} / {min(ratios):.2f}"
    return f"{middle} ({statistics.fmean(c.tokens_per_step for c in cells):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, nargs="+", default=[4])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0, 20.0, 50.0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help=f"per strategy, request; {MAX_TURNS} turns max")
    parser.add_argument("--strategies", nargs="+", default=["auto", "tree", "pipedec"], choices=STRATEGIES)
    parser.add_argument(
        "--drafters", nargs="+", default=[BUNDLED], help="beside the n-gram drafter, one after the other; ngram: none"
    )
    parser.add_argument("--fresh", action="store_true", help="the prompts of fresh_prompts.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = f"{os.cpu_count()} cores, one thread a node"
    print(f"SmolLM2-135M-Instruct, fp32, {args.tokens} greedy tokens, {machine}\n")
    print("| hops | delay, ms | request | drafter | strategy | tokens/s | over sequential | used", end="")
    print(" | tokens/step | rows/token | top-1 acceptance | kB sent/token |\n" + "|---" * 12 + "|")
    cells: list[Cell] = []
    for hops in args.hops:
        for delay in args.delays:
            cells += uvloop.run(measure(hops, delay, args))
    print(summary(cells))
    if args.json:
        args.json.write_text(json.dumps([asdict(c) for c in cells], indent=2) + "\n")


if __name__ == "__main__":
    main()
