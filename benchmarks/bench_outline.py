"""Time of outlined answers against sequential ones: real node processes, emulated links, twenty questions.

    python benchmarks/bench_outline.py [--questions 20] [--hops 4] [--delay-ms 20] [--model NAME] [--answers FILE]

Every question is answered four ways, one after another, greedily: in sequence and by an outline, each without and with
speculation (Jupiter, Table V). Answers differ in length, so tokens/s of the whole answer stand beside the times: from
the request to the last token, the outline's time included. An outline changes the words: --answers writes them side by
side, for people to judge. A question whose outline could not be used was answered in sequence, after it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from emulated_swarm import ShapedSwarm, equal_spans, far_client

from swarm.config import DEFAULT_MODEL
from swarm_client import SwarmClient
from swarm_client.api.options import GenerationKeywords
from swarm_kernels.models.open import open_model

QUESTIONS = (
    "What are the benefits of regular exercise?",
    "How do I prepare for a job interview?",
    "Explain how photosynthesis works.",
    "What are the main causes of climate change?",
    "Compare cats and dogs as pets.",
    "Give me some tips for learning a new language.",
    "What are the pros and cons of working from home?",
    "Why is sleep important for our health?",
    "How can I save money on groceries?",
    "Describe the main parts of a computer.",
    "What are the effects of social media on teenagers?",
    "How does a refrigerator work?",
    "What are some ways to reduce stress?",
    "Compare travelling by train and by plane.",
    "How do I start a vegetable garden?",
    "Explain the importance of the oceans.",
    "What would happen if bees disappeared?",
    "Suggest five activities for a rainy day.",
    "What are the differences between a novel and a film?",
    "Tell me about the history of the bicycle.",
)
CELLS: dict[str, GenerationKeywords] = {
    "sequence": {"decoding": "sequential"},
    "sequence, speculative": {"decoding": "auto"},
    "outline": {"decoding": "outline", "point_decoding": "sequential"},
    "outline, speculative": {"decoding": "outline", "point_decoding": "auto"},
}
PLAIN = next(iter(CELLS))


@dataclass(frozen=True)
class Run:
    question: str
    cell: str
    seconds: float
    tokens: int
    first_s: float
    points: int  # 0: an ordinary answer
    outline_s: float
    cached: float  # fraction of the points' prompt tokens found in the prefix cache
    reason: str
    text: str

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def ask(client: SwarmClient, question: str, cell: str, tokens: int) -> Run:
    options: GenerationKeywords = {**CELLS[cell], "max_new_tokens": tokens}
    started = time.perf_counter()
    answer = await client.chat([{"role": "user", "content": question}], **options)
    seconds = time.perf_counter() - started
    report = answer.outline
    points = report.points if report is not None else ()
    prompts = sum(len(point.prompt_token_ids) for point in points)
    return Run(
        question,
        cell,
        seconds,
        len(answer.token_ids),
        answer.time_to_first_token_s,
        len(points),
        report.ended_s if report is not None else 0.0,
        sum(point.cached_tokens for point in points) / prompts if prompts else 0.0,
        report.reason if report is not None else "",
        answer.text,
    )


async def measure(model: str, hops: int, delay_ms: float, questions: Sequence[str], tokens: int) -> list[Run]:
    runs: list[Run] = []
    source = open_model(model)
    layers = source.config.num_layers
    source.close()
    with ShapedSwarm(equal_spans(layers, hops), delay_ms, model=model) as swarm:
        async with AsyncExitStack() as stack:
            clients: dict[str, SwarmClient] = {}
            for cell in CELLS:  # one each: hops share cached prefixes among the sessions of one client only
                clients[cell] = await stack.enter_async_context(far_client(swarm.address, delay_ms, model=model))
                await ask(clients[cell], "Hello!", PLAIN, 8)  # connections
            for question in questions:
                for cell, client in clients.items():
                    runs.append(await ask(client, question, cell, tokens))
                    print(line(runs[-1], runs), flush=True)
    return runs


def line(made: Run, runs: Sequence[Run]) -> str:
    plain = next(r for r in runs if r.question == made.question and r.cell == PLAIN)
    return (
        f"| {made.question} | {made.cell} | {made.points or '-'} | {made.tokens} | {made.seconds:.1f} "
        f"| {made.first_s:.2f} | {made.cached:.2f} | {plain.seconds / made.seconds:.2f} "
        f"| {made.rate / plain.rate:.2f} |"
    )


def summary(runs: Sequence[Run]) -> str:
    questions_asked = {r.question for r in runs}
    outlined = [r for r in runs if r.cell == "outline"]
    failed = [r for r in outlined if not r.points]
    lines = [
        "",
        f"Without a usable outline: {len(failed)} of {len(outlined)} questions.",
        *(f"- {r.question} ({r.reason})" for r in failed),
        "",
        "Geometric means over the questions, against 'sequence':",
        "",
        "| | questions | time | tokens/s of the whole answer | tokens |",
        "|---|---|---|---|---|",
    ]
    long = {r.question for r in outlined if r.points >= 4}
    for name, questions in (("all", questions_asked), ("four points or more", long)):
        for cell in CELLS if questions else ():
            lines.append(_mean(f"{name}: {cell}", cell, questions, runs))
    return "\n".join(lines)


def _mean(name: str, cell: str, questions: set[str], runs: Sequence[Run]) -> str:
    plain = {r.question: r for r in runs if r.cell == PLAIN}
    mine = [r for r in runs if r.cell == cell and r.question in questions]
    times = statistics.geometric_mean(plain[r.question].seconds / r.seconds for r in mine)
    rates = statistics.geometric_mean(r.rate / plain[r.question].rate for r in mine)
    tokens = statistics.mean(r.tokens for r in mine)
    return f"| {name} | {len(mine)} | {times:.2f} | {rates:.2f} | {tokens:.0f} |"


def side_by_side(runs: Sequence[Run]) -> str:
    """Markdown: for each question the sequential answer and the outlined one."""
    parts: list[str] = []
    for question in dict.fromkeys(r.question for r in runs):
        parts.append(f"# {question}\n")
        for run_made in (r for r in runs if r.question == question and r.cell in (PLAIN, "outline")):
            why = f" ({run_made.reason})" if run_made.reason else ""
            parts.append(f"## {run_made.cell}, {run_made.seconds:.1f} s{why}\n\n{run_made.text.strip()}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--hops", type=int, default=4)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=384, help="the longest answer")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--answers", type=Path, help="write the answers here, side by side")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"{args.model}, fp32, {args.hops} hops, {args.delay_ms:g} ms one way, at most {args.tokens} greedy tokens, ",
        end="",
    )
    print(f"{os.cpu_count()} cores, one thread a node\n")
    print("| question | answered by | points | tokens | s | first token, s | cached | time, times | tokens/s, times |")
    print("|---|---|---|---|---|---|---|---|---|")
    questions = QUESTIONS[: args.questions]
    runs = uvloop.run(measure(args.model, args.hops, args.delay_ms, questions, args.tokens))
    print(summary(runs))
    if args.answers:
        args.answers.write_text(side_by_side(runs), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in runs], indent=2) + "\n")


if __name__ == "__main__":
    main()
