"""Tokens/s of answers within random JSON schemas over free text: real node processes, emulated one-way delays.

    python benchmarks/bench_grammar.py [--schemas 200] [--hops 4] [--delay 20] [--json FILE]

Each schema (`random_schemas`, seeded, deeper and deeper) is put into a request, which is answered twice in turn with
the same decoding: within the schema, and as free text of as many tokens, but 32 at least. An answer that ends must
validate with `jsonschema`, or the run fails. Nodes as in `bench_speculation`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
import uvloop
from emulated_swarm import ShapedSwarm, equal_spans, far_client
from random_schemas import random_schema

from swarm_client import GenerationResult, SwarmClient
from swarm_client.api.grammars import json_schema_grammar
from swarm_client.api.options import STRATEGIES
from swarm_client.speculation.drafter_factory import BUNDLED
from swarm_kernels.models.open import open_model

MODEL = "smollm2-135m"
MAX_DEPTH = 4
MIN_FREE_TOKENS = 32
PROMPT = "Write one JSON object with made-up values that fits this JSON schema:\n{schema}"


@dataclass(frozen=True)
class Pair:
    """One schema's two answers. `ended`: the constrained one, before the limit of tokens."""

    seed: int
    depth: int
    tokens: int
    ended: bool
    tokens_per_s: float
    free_tokens_per_s: float
    tokens_per_step: float
    free_tokens_per_step: float
    first_token_s: float
    free_first_token_s: float

    @property
    def ratio(self) -> float:
        return self.tokens_per_s / self.free_tokens_per_s


async def measure(args: argparse.Namespace) -> list[Pair]:
    layers = open_model(MODEL).config.num_layers
    pairs = []
    with ShapedSwarm(equal_spans(layers, args.hops), args.delay) as swarm:
        async with far_client(swarm.address, args.delay, settings={"drafter": args.drafter}) as client:
            warm = json_schema_grammar({"type": "boolean"})
            await client.generate("Hello!", max_new_tokens=8)
            await client.generate("Hello!", max_new_tokens=8, grammar=warm)  # the tokenizers of both sides
            for seed in range(args.schemas):
                pairs.append(await answer_twice(client, seed, seed * (MAX_DEPTH + 1) // args.schemas, args))
                if args.verbose:
                    print(pairs[-1], f"ratio {pairs[-1].ratio:.2f}", flush=True)
    return pairs


async def answer_twice(client: SwarmClient, seed: int, depth: int, args: argparse.Namespace) -> Pair:
    schema = random_schema(seed, depth)
    messages = [{"role": "user", "content": PROMPT.format(schema=json.dumps(schema))}]
    options: dict[str, Any] = {"decoding": args.decoding}
    answer = await client.chat(messages, max_new_tokens=args.tokens, grammar=json_schema_grammar(schema), **options)
    ended = answer.finish_reason == "eos"
    if ended:
        jsonschema.validate(json.loads(answer.text), schema)
    count = max(MIN_FREE_TOKENS, len(answer.token_ids))
    free = await client.chat(messages, max_new_tokens=count, ignore_eos=True, **options)
    return Pair(
        seed,
        depth,
        len(answer.token_ids),
        ended,
        answer.tokens_per_second,
        free.tokens_per_second,
        per_step(answer),
        per_step(free),
        answer.time_to_first_token_s,
        free.time_to_first_token_s,
    )


def per_step(answer: GenerationResult) -> float:
    return float((answer.speculation or {}).get("tokens_per_step", 1.0))


def summary(pairs: list[Pair]) -> str:
    lines = ["| depth | answers | ended, all valid | tokens | tokens/s | free text | median ratio | worst |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for depth in [*sorted({pair.depth for pair in pairs}), None]:
        mine = [pair for pair in pairs if depth is None or pair.depth == depth]
        ratios = [pair.ratio for pair in mine]
        lines.append(
            f"| {'all' if depth is None else depth} | {len(mine)} | {sum(pair.ended for pair in mine)} "
            f"| {sum(pair.tokens for pair in mine)} | {statistics.median(pair.tokens_per_s for pair in mine):.1f} "
            f"| {statistics.median(pair.free_tokens_per_s for pair in mine):.1f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} |"
        )
    ratios = [pair.ratio for pair in pairs]
    lines.append(f"\nover free text: geometric mean {statistics.geometric_mean(ratios):.2f}, ")
    lines[-1] += f"tokens a step {statistics.mean(p.tokens_per_step for p in pairs):.2f} against "
    lines[-1] += f"{statistics.mean(p.free_tokens_per_step for p in pairs):.2f}"
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--hops", type=int, default=4)
    parser.add_argument("--delay", type=float, default=20.0, help="ms, one way")
    parser.add_argument("--tokens", type=int, default=512, help="the most of an answer")
    parser.add_argument("--decoding", default="auto", choices=STRATEGIES)
    parser.add_argument("--drafter", default=BUNDLED, help="the drafter beside the n-gram drafter; ngram: none")
    parser.add_argument("--verbose", action="store_true", help="a line for each schema")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"SmolLM2-135M-Instruct, fp32, greedy, {args.decoding}, drafter {args.drafter}, {os.cpu_count()} cores\n")
    pairs = uvloop.run(measure(args))
    print(summary(pairs))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1))


if __name__ == "__main__":
    main()
