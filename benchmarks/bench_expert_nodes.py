"""What it costs that a hop is several nodes: a leader and two that hold experts, against one node with everything.

    PYTHONPATH=tests:tests/e2e:tests/kernels python benchmarks/bench_expert_nodes.py [--delays 0 5] [--dtype bf16]

Whole nodes and a client in one process, in real time, on a network in memory whose links take `--delays` ms one way.
Both swarms answer in turn; the tokens must be equal, or the run fails. Bytes are those between leader and holders. One
process has one interpreter lock for all of them, and one machine's cores: a split hop of machines of its own has more.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from expert_swarm import ExpertSwarm, expert_swarm
from tiny_models import ModelTensors, tiny_model

from swarm.testing.memory_network import LinkModel

LAYERS, EXPERTS, CHOSEN, HIDDEN = 4, 24, 4, 512
PROMPT, TOKENS, ROUNDS = list(range(2, 66)), 48, 7


def model() -> ModelTensors:
    sizes: dict[str, Any] = {
        "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "head_dim": 64, "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 256, "norm_topk_prob": True,
    }  # fmt: skip
    return ModelTensors(tiny_model("qwen3_moe", **sizes))


async def answer(client: Any) -> tuple[list[int], float, float]:
    """-> (tokens, seconds until the first, tokens a second after it)."""
    times: list[float] = []
    begun = time.perf_counter()
    async with client.stream(PROMPT, max_new_tokens=TOKENS, decoding="sequential") as stream:
        async for piece in stream:
            times += [time.perf_counter()] * len(piece.token_ids)
        tokens = list(stream.result.token_ids)
    return tokens, times[0] - begun, (len(times) - 1) / (times[-1] - times[0])


async def measure(source: ModelTensors, delay_ms: float, dtype: str) -> None:
    link, third = LinkModel(delay_s=delay_ms / 1e3), EXPERTS // 3
    async with AsyncExitStack() as stack:
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        swarms: list[ExpertSwarm] = [await stack.enter_async_context(expert_swarm(patch, source, link)) for _ in "12"]
        whole, split = swarms
        whole.add(dtype=dtype, layers=f"0:{LAYERS}")
        leader = split.add(dtype=dtype, layers=f"0:{LAYERS}", experts=f"0:{third}", lead=True)
        for part in (f"{third}:{2 * third}", f"{2 * third}:{EXPERTS}"):
            split.add(dtype=dtype, layers=f"0:{LAYERS}", experts=part)
        clients = []
        for swarm in swarms:
            await swarm.covered()
            clients.append(await stack.enter_async_context(swarm.client()))
        counters = leader.inside._experts.exchange.counters
        found: list[list[tuple[float, float]]] = [[], []]
        before = counters.sent_bytes, counters.received_bytes, counters.asked
        for _ in range(ROUNDS):
            tokens = []
            for client, times in zip(clients, found, strict=True):
                said, first_s, rate = await answer(client)
                tokens.append(said)
                times.append((first_s, rate))
            assert tokens[0] == tokens[1], "the split hop said something else"
        rows = ROUNDS * LAYERS * (len(PROMPT) + TOKENS - 1)
        sent, received = counters.sent_bytes - before[0], counters.received_bytes - before[1]
        rates = [statistics.median(rate for _, rate in times) for times in found]
        firsts = [1e3 * statistics.median(first for first, _ in times) for times in found]
        print(
            f"{dtype}, links of {delay_ms:g} ms: one node {rates[0]:.1f} tokens/s, split {rates[1]:.1f}, "
            f"{rates[1] / rates[0]:.2f} of it; first token {firsts[0]:.0f} and {firsts[1]:.0f} ms; "
            f"{leader.inside._spans.cost.ms_at(1):.2f} ms a layer announced; {sent / rows:.0f} + {received / rows:.0f} "
            f"bytes a token and layer, of {(counters.asked - before[2]) / rows:.2f} experts elsewhere"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0], help="one way, ms")
    parser.add_argument("--dtype", nargs="+", default=["bf16", "int8"])
    given = parser.parse_args()
    source = model()
    for dtype in given.dtype:
        for delay_ms in given.delays:
            asyncio.run(measure(source, delay_ms, dtype))


if __name__ == "__main__":
    main()
