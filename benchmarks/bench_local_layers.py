"""What it costs a client to hold the ends of the model, in virtual time: four hops, links of 0 and 20 ms.

    PYTHONPATH=tests:tests/e2e:tests/kernels python benchmarks/bench_local_layers.py [--delays 0 20] [--slower 1 2 4]

The real client, nodes, messages and hops at home, on a clock that jumps from event to event: what is measured is what
holding the ends adds to the way of a step. How long layers and head take is measured here first, on one layer and the
head of the built-in model (of many runs the quickest, so that other load does not count); `--slower` makes the client's
machine so many times slower than the nodes. A tiny random model of as many layers stands in for the arithmetic, and the
tokens of all runs must be equal, or the run fails. "none" is a client that holds nothing.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

from memory_swarm import VirtualDevice, cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import run

from swarm.config import DEFAULT_MODEL
from swarm.testing.memory_network import LinkModel
from swarm.types import Hop
from swarm_client.home.served_ends import weight_bytes
from swarm_kernels.calibration.span_steps import step_cost
from swarm_kernels.device.device import parse_dtype
from swarm_kernels.models.open import open_model
from swarm_kernels.runtime.load import load_span

PROMPT, TOKENS = 32, 64
HOPS = 4
SHARES: dict[str, tuple[int, int] | None] = {
    "none": None,
    "0:0": (0, 0),
    "1:1": (1, 1),
    "2:2": (2, 2),
    "4:2": (4, 2),
}
BASE = "0:0"
ROUNDS = 10  # of `step_cost`, each of which takes the quickest of a few runs


@dataclass(frozen=True)
class Costs:
    """Of the built-in model, one row: ms of a layer, and of norm and head. `layers`: how many it has."""

    layers: int
    layer_ms: float
    head_ms: float
    layer_mib: float
    ends_mib: float


def measure_costs(dtype: str) -> Costs:
    source = open_model(DEFAULT_MODEL)
    count = source.config.num_layers
    head = load_span(source, Hop("", count, count).span, parse_dtype(dtype))
    first = load_span(source, Hop("", 0, 0).span, parse_dtype(dtype), like=head)
    one = load_span(source, Hop("", 0, 1).span, parse_dtype(dtype), like=head)
    layer_ms, head_ms = (min(step_cost(span).ms_at(1) for _ in range(ROUNDS)) for span in (one, head))
    mib = 2**20
    return Costs(count, layer_ms, head_ms, one.layer_bytes / mib, weight_bytes(first, head) / mib)


async def answer(share: tuple[int, int] | None, delay_ms: float, costs: Costs, slower: float) -> Any:
    """One answer of a swarm and a client that hold what `share` says."""
    made = tiny_model("llama", num_hidden_layers=costs.layers, hidden_size=24, intermediate_size=32)
    source = ModelTensors(made)
    borders = [round(i * costs.layers / HOPS) for i in range(1, HOPS)]
    first, last = share or (0, 0)
    rng = random.Random(1)
    prompt = [rng.randrange(2, 131) for _ in range(PROMPT)]
    local = f"{first}:{last}" if share is not None else "none"
    async with (
        memory_swarm(source, cut(costs.layers, *borders), LinkModel(delay_s=delay_ms / 1e3)) as swarm,
        swarm.client(local_layers=local) as client,
    ):
        for node in swarm.nodes.values():
            own = range(max(node.span.start, first), min(node.span.end, costs.layers - last))
            head_ms = costs.head_ms if share is None and node.span.end == costs.layers else 0.0
            node.device.delay_s = (len(own) * costs.layer_ms + head_ms) / 1e3
        if client.home is not None:
            for link, ms in zip(client.home.links.values(), _home_ms(first, last, costs), strict=True):
                for span in link._server.served_spans:
                    span.executor._device = VirtualDevice(slower * ms / 1e3)
        return await client.generate(prompt, max_new_tokens=TOKENS, decoding="sequential", ignore_eos=True)


def _home_ms(first: int, last: int, costs: Costs) -> tuple[float, float]:
    return first * costs.layer_ms, last * costs.layer_ms + costs.head_ms


def table(delay_ms: float, costs: Costs, slower: float) -> str:
    answers = {name: run(answer(share, delay_ms, costs, slower)) for name, share in SHARES.items()}
    if len({one.token_ids for one in answers.values()}) > 1:
        raise SystemExit(f"the tokens differ: {answers}")
    lines = [
        f"{HOPS} hops, {delay_ms:g} ms a link one way, the client {slower:g} times slower than a node",
        "| held | tokens/s | over (0, 0) | first token, s | computed at home, ms a token | weights at home, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in answers.items():
        share = SHARES[name]
        home_ms = slower * sum(_home_ms(*share, costs)) if share is not None else 0.0
        mib = costs.ends_mib + sum(share) * costs.layer_mib if share is not None else 0.0
        speed, first_s = one.tokens_per_second, one.time_to_first_token_s
        ratio = speed / answers[BASE].tokens_per_second
        lines.append(f"| {name} | {speed:.2f} | {ratio:.3f} | {first_s:.3f} | {home_ms:.2f} | {mib:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--slower", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    costs = measure_costs(args.dtype)
    print(f"{args.dtype}: a layer takes {costs.layer_ms:.2f} ms, norm and head {costs.head_ms:.2f} ms", flush=True)
    for slower in args.slower:
        for delay_ms in args.delays:
            print(table(delay_ms, costs, slower), flush=True)


if __name__ == "__main__":
    main()
