"""Time to first token: chunked prefill planned for the chain against one chunk, and a prefix cache hit.

    python benchmarks/bench_prefill.py [--hops 2 4 8] [--prompts 256 1000 4000] [--slower 32] [--delay-ms 2]

Real node processes, each `slower` times as slow as this machine (asleep, so that many of them fit into it). "One pass":
steps of up to 1024 tokens, each sent when the one before has come back. Two ideals, both without links and without what
a step costs besides computing: *endless*, of chunks that cost no more a row than the whole prompt and a chain that is
always full (all hops' time over the slowest one's, so the number of hops if they have as many layers), and *possible*,
the best cut into equal chunks on hops whose times for that many rows are the published ones. The prediction is what
`routing.prefill_chunks` expects of the chunks it chose, from the same live costs that it chose them by.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from dataclasses import dataclass

import uvloop
from bench_swarm import prompt
from emulated_swarm import ShapedSwarm, equal_spans, far_client

from swarm.planner.costs.chain_costs import ChainCosts
from swarm_client import SwarmClient
from swarm_client.routing.prefill_chunks import POLICY, prompt_chunks
from swarm_kernels.models.open import open_model

MODEL = "smollm2-135m"
ONE_BY_ONE = {"prefill_chunk": 1024, "prefill_window": 1}  # 1024: the most rows of a step


async def first_token(client: SwarmClient, tokens: list[int]) -> tuple[float, int]:
    """-> (seconds, prompt tokens found in the prefix cache)."""
    answer = await client.generate(tokens, max_new_tokens=1)
    return answer.time_to_first_token_s, answer.cached_prompt_tokens


async def measure(hops: int, args: argparse.Namespace) -> None:
    layers = open_model(MODEL).config.num_layers
    with ShapedSwarm(equal_spans(layers, hops), args.delay_ms, dtype=args.dtype, slower=args.slower) as swarm:
        async with (
            far_client(swarm.address, args.delay_ms) as planned,
            far_client(swarm.address, args.delay_ms, settings=ONE_BY_ONE) as whole,
        ):
            for client in (planned, whole):
                await first_token(client, prompt(40))
            for length in args.prompts:
                measured = [await once(planned, whole, length, salt) for salt in range(args.rounds)]
                one, ours, again = (statistics.median(column) for column in zip(*measured, strict=True))
                speedup = statistics.median(a / b for a, b, _ in measured)
                chain = (await planned.generate(prompt(40), max_new_tokens=1)).chain
                plan = forecast(length, planned.chain_costs(chain))
                print(
                    f"| {hops} | {length} | {one:.2f} | {ours:.2f} | {speedup:.2f} | {plan.speedup:.2f} "
                    f"| {plan.possible:.2f} | {speedup / plan.possible:.2f} | {plan.endless:.2f} "
                    f"| {speedup / plan.endless:.2f} | {plan.chunks} | {again:.2f} |",
                    flush=True,
                )


async def once(planned: SwarmClient, whole: SwarmClient, length: int, salt: int) -> tuple[float, float, float]:
    """-> seconds of one pass and of a pipelined one, and a prefix cache hit's time over the latter."""
    tokens = [(token + 7 * salt) % 40000 for token in prompt(length)]
    one, _ = await first_token(whole, tokens)
    ours, cached = await first_token(planned, tokens)
    if cached:
        raise RuntimeError("a first request hit the prefix cache")
    second, _ = await first_token(planned, [*tokens, 17, 42])
    return one, ours, second / ours


@dataclass(frozen=True)
class Prediction:
    speedup: float
    possible: float
    endless: float
    chunks: int


def forecast(length: int, costs: ChainCosts) -> Prediction:
    """What `routing.prefill_chunks` expects of the chunks it chose, links included, against one pass through all."""
    chunks, links = prompt_chunks(length, costs), sum(costs.link_ms)
    stages = [stage.ms(length) for stage in costs.stages]
    pipelined, one = costs.prefill_ms(chunks, POLICY.step_ms) + links, sum(stages)
    possible = min(pipeline_ms(length, count, costs) for count in range(1, length // POLICY.min_chunk + 1))
    return Prediction((one + links) / pipelined, one / possible, one / max(stages), len(chunks))


def pipeline_ms(length: int, count: int, costs: ChainCosts) -> float:
    """`length` tokens in `count` equal chunks through hops that take the times of their cost curves only."""
    times = [stage.ms(math.ceil(length / count)) for stage in costs.stages]
    return sum(times) + (count - 1) * max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1000, 4000])
    parser.add_argument("--slower", type=float, default=32.0)
    parser.add_argument("--delay-ms", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    print(
        f"SmolLM2-135M-Instruct, {args.dtype}, {os.cpu_count()} cores, nodes {args.slower:g} times as slow as "
        "this machine\n"
    )
    print(
        "| hops | prompt | one pass, s | planned, s | speed-up | predicted | possible | of it | endless | of it "
        "| chunks | prefix cache hit, over the first |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for hops in args.hops:
        uvloop.run(measure(hops, args))


if __name__ == "__main__":
    main()
