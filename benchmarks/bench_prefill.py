"""Time to first token: prompts cut for the chain against one chunk, and a second request with the same beginning.

    python benchmarks/bench_prefill.py [--hops 2 4 8] [--prompts 256 1000 4000] [--chain-ms 2] [--delay-ms 2]

Real node processes; each is made slower by `chain-ms / hops` a row (asleep, so that many fit into this machine), so one
pass takes as long on every chain. The ideal speed-up over one pass without overlap is the number of hops.
"""

from __future__ import annotations

import argparse
import os
import statistics

import uvloop
from bench_swarm import prompt
from shaped_swarm import ShapedSwarm, equal_spans, far_client

from swarm_client import SwarmClient
from swarm_client.chunks import prompt_chunks
from swarm_kernels.loader import open_model

MODEL = "smollm2-135m"
ONE_CHUNK = 1024  # the most rows of a step


async def first_token(client: SwarmClient, tokens: list[int]) -> tuple[float, int]:
    """-> (seconds, prompt tokens that the hops held already)."""
    answer = await client.generate(tokens, max_new_tokens=1)
    return answer.time_to_first_token_s, answer.held_tokens


async def measure(hops: int, args: argparse.Namespace) -> None:
    layers = open_model(MODEL).config.num_layers
    with ShapedSwarm(equal_spans(layers, hops), args.delay_ms, row_ms=args.chain_ms / hops) as swarm:
        async with (
            far_client(swarm.address, args.delay_ms) as planned,
            far_client(swarm.address, args.delay_ms, settings={"prefill_chunk": ONE_CHUNK}) as whole,
        ):
            for client in (planned, whole):
                await first_token(client, prompt(40))
            for length in args.prompts:
                ratios, again, cut, plain = [], [], [], []
                for i in range(args.rounds):
                    tokens = [(token + 7 * i) % 40000 for token in prompt(length)]
                    one, _ = await first_token(whole, tokens)
                    ours, held = await first_token(planned, tokens)
                    if held:
                        raise RuntimeError("a first request was not the first")
                    second, _ = await first_token(planned, [*tokens, 17, 42])
                    plain.append(one)
                    cut.append(ours)
                    ratios.append(one / ours)
                    again.append(second / ours)
                chain = (await planned.generate(prompt(40), max_new_tokens=1)).chain
                chunks = len(prompt_chunks(length, planned.chain_costs(chain)))
                print(
                    f"| {hops} | {length} | {statistics.median(plain):.2f} | {statistics.median(cut):.2f} "
                    f"| {statistics.median(ratios):.2f} | {hops if length <= ONE_CHUNK else '-'} | {chunks} "
                    f"| {statistics.median(again):.2f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1000, 4000])
    parser.add_argument("--chain-ms", type=float, default=2.0)
    parser.add_argument("--delay-ms", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print(
        f"SmolLM2-135M-Instruct, fp32, {os.cpu_count()} cores, {args.chain_ms:g} ms a row more over the whole chain\n"
    )
    print(
        "| hops | prompt | one chunk, s | planned, s | speed-up | ideal | chunks | same beginning again, of the first |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for hops in args.hops:
        uvloop.run(measure(hops, args))


if __name__ == "__main__":
    main()
