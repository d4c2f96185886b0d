"""One layer's experts, random weights, beside transformers' own: `python benchmarks/bench_experts.py`, a table out.

Rows choose their experts at random, so the weights that are read are those of the union of their choices. Everything in
a row of the table is measured in turn; the bound is the bytes of the chosen experts over the speed of memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_timing import Timed, measure, table, wall
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from swarm_kernels.device.device import INT4, dtype_name, physical_cores
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.experts import Gating
from swarm_kernels.ops.base.layer_weights import Experts
from swarm_kernels.runtime.hf_experts import gating_of
from swarm_kernels.runtime.weight_reader import packs_of

ROWS = (1, 4, 16, 64)
OURS = (torch.bfloat16, torch.int8, INT4)
THEIRS = ("eager", "grouped_mm")
_SUMMED = 1 << 28  # bytes that torch sums beside: the speed of memory
BATCHES = 8  # of other rows, in turn: otherwise one row's experts would stay in a cache


@dataclass(frozen=True)
class Shape:
    kind: str
    experts: int
    chosen: int
    hidden: int
    width: int
    module: Any

    def config(self) -> Any:
        sizes = {"hidden_size": self.hidden, "num_experts": self.experts, "num_local_experts": self.experts,
                 "moe_intermediate_size": self.width, "intermediate_size": self.width}  # fmt: skip
        return AutoConfig.for_model(self.kind, **sizes)


SHAPES = {
    "Qwen3-30B-A3B": Shape("qwen3_moe", 128, 8, 2048, 768, Qwen3MoeExperts),
    "gpt-oss-20b": Shape("gpt_oss", 32, 4, 2880, 2880, GptOssExperts),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each cell is measured")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-30B-A3B")
    parser.add_argument("--use", default="best", help="avx512bf16, avx512vnni, avx512, avx2 or generic")
    args = parser.parse_args()
    dispatch.select_isa(args.use)
    dispatch.set_threads(args.threads)
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    with torch.inference_mode():
        print(f"{dispatch.describe()}, {args.threads} threads")
        print(f"\n{args.shape}: {shape.experts} experts, {shape.chosen} a row, ms a layer\n")
        print(bench(shape, args.seconds))


def bench(shape: Shape, seconds: float) -> str:
    memory = torch.ones(_SUMMED >> 2)
    module = transformers_experts(shape)
    gating = gating_of(module)
    assert gating is not None
    ours = {dtype_name(dtype): pack(shape, module, dtype, gating) for dtype in OURS}
    lines = []
    for rows in ROWS:
        batches = [_batch(shape, rows) for _ in range(BATCHES)]
        works = {name: _wide(experts, batches) for name, experts in ours.items()}
        works["sum"] = wall(memory.sum)
        for name in THEIRS:
            works[name] = _theirs(module, name, batches)
        check(module, ours["bf16"], batches[0])
        pairs = measure(seconds, works)
        union = sum(len(set(index.flatten().tolist())) for _, index, _ in batches) / BATCHES
        sums = {name: union * experts.nbytes / shape.experts / _SUMMED for name, experts in ours.items()}  # the bound
        best = min(THEIRS, key=pairs.median)
        times = " | ".join(f"{pairs.median(name):.2f}" for name in (*ours, *THEIRS))
        ratios = " | ".join(f"{pairs.ratio(name, 'sum') / sums[name]:.2f}" for name in ours)
        speed_of_memory = _SUMMED / 1e6 / pairs.median("sum")
        speed = " | ".join(f"{pairs.ratio(name, best):.2f}" for name in ours)
        print(f"measured {rows} rows", file=sys.stderr, flush=True)
        lines.append(f"{rows} | {union:.1f} | {speed_of_memory:.0f} | {times} | {ratios} | {speed}")
    names = [dtype_name(dtype) for dtype in OURS]
    heads = [*names, *THEIRS, *(f"{name} / bound" for name in names), *(f"{name} / best of theirs" for name in names)]
    return table(" | ".join(("rows", "experts read", "memory, GB/s", *heads)), lines)


def transformers_experts(shape: Shape) -> Any:
    config = shape.config()
    config._experts_implementation = "eager"
    module = shape.module(config).to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.normal_(0, 0.02)
    return module.requires_grad_(False)


def pack(shape: Shape, module: Any, dtype: torch.dtype, gating: Gating) -> Experts:
    packs = packs_of(dtype)
    linear = packs.plain if packs.four_bits is None else packs.four_bits.rounded
    first, second = [], []
    for expert in range(shape.experts):
        up, down = module.gate_up_proj[expert], module.down_proj[expert]
        up_bias = module.gate_up_proj_bias[expert] if module.has_bias else None
        if module.is_transposed:
            up, down = up.T, down.T
        if not module.is_concatenated:
            up, up_bias = (None if x is None else torch.cat((x[::2], x[1::2])) for x in (up, up_bias))
        first.append(linear(up.contiguous(), up_bias))
        second.append(linear(down.contiguous(), module.down_proj_bias[expert] if module.has_bias else None))
    return dispatch.pack_experts(first, second, gating)


def check(module: Any, experts: Experts, batch: tuple[torch.Tensor, ...]) -> None:
    """A benchmark of something else would be worth nothing."""
    x, index, scores = batch
    module.config._experts_implementation = "eager"
    expected = module(x.bfloat16(), index, scores).float()
    assert (experts(x.bfloat16().float(), index, scores) - expected).norm() < 0.02 * expected.norm()


def _batch(shape: Shape, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.stack([torch.randperm(shape.experts)[: shape.chosen] for _ in range(rows)])
    return torch.randn(rows, shape.hidden), index, torch.rand(rows, shape.chosen)


def _wide(experts: Experts, batches: Sequence[tuple[torch.Tensor, ...]]) -> Timed:
    turn = iter(range(1 << 62))
    return wall(lambda: experts(*batches[next(turn) % BATCHES]))


def _theirs(module: Any, name: str, batches: Sequence[tuple[torch.Tensor, ...]]) -> Timed:
    halves = [(x.bfloat16(), index, scores.bfloat16()) for x, index, scores in batches]
    turn = iter(range(1 << 62))

    def run() -> None:
        module.config._experts_implementation = name
        module(*halves[next(turn) % BATCHES])

    return wall(run)


if __name__ == "__main__":
    main()
