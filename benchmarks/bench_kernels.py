"""Times the CPU kernels beside torch's own, and a whole SmolLM2-135M, in one run: `python benchmarks/bench_kernels.py`.

Each pair of rows is measured alternately, so a busy machine slows both. Weights are random: no model is needed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm_kernels import ops
from swarm_kernels.batch import PAGE, BatchPlan

HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, LAYERS, VOCAB = 576, 9, 3, 64, 1536, 30, 49152  # SmolLM2-135M
NONE = torch.zeros(0, dtype=torch.int64)
SETTLE_S = 0.02  # OpenMP's threads go on spinning for milliseconds after torch's last operator
BURST_S = 0.05


def measure(seconds: float, *works: Callable[[], object]) -> list[tuple[float, float]]:
    """(least, median) milliseconds of each work, run in turn, in bursts."""
    times: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + seconds * len(works)
    while time.perf_counter() < end or len(times[0]) < 3:
        for work, taken in zip(works, times, strict=True):
            time.sleep(SETTLE_S)
            work()
            burst = time.perf_counter() + BURST_S
            while time.perf_counter() < burst:
                start = time.perf_counter()
                work()
                taken.append((time.perf_counter() - start) * 1e3)
    return [(min(taken), statistics.median(taken)) for taken in times]


def row(name: str, result: tuple[float, float], work: float, unit: str) -> None:
    """One line of the table; `work` in GB or GFLOP."""
    least, median = result
    print(f"{name:<44} {least:>9.3f} {median:>9.3f} {work / least * 1e3:>9.1f} {unit}")


def session_plan(context: int, rows: int, tree: bool) -> tuple[BatchPlan, int]:
    """`rows` rows of one session after `context` committed keys: a chain of tree slots, or committed on arrival."""
    committed = context + (0 if tree else rows)
    dense, sparse = -(-committed // PAGE), -(-rows // PAGE) if tree else 0
    index = torch.arange(rows)
    masks = torch.zeros(rows, -(-rows // 64) if tree else 0, dtype=torch.int64)
    if tree:
        for i in range(rows):
            masks[i, i // 64] |= -(1 << 63) if i % 64 == 63 else 1 << i % 64
            if i:
                masks[i] |= masks[(i - 1) // 2]  # a binary tree
    plan = BatchPlan(
        positions=context + index,
        session=torch.zeros(rows, dtype=torch.int32),
        past=torch.full((rows,), context, dtype=torch.int32) if tree else (context + index + 1).int(),
        write=dense * PAGE + index if tree else context + index,
        pages=torch.arange(dense, dtype=torch.int32)[None],
        tree_pages=dense + torch.arange(sparse, dtype=torch.int32)[None],
        tree_mask=masks,
        copy_from=NONE,
        copy_to=NONE,
    )
    return plan, dense + sparse


@dataclass
class Model:
    """SmolLM2-135M's shapes with random weights."""

    layers: list[ops.LayerWeights]
    head: ops.Linear

    @classmethod
    def random(cls, dtype: torch.dtype) -> Model:
        def linear(outputs: int, inputs: int) -> ops.Linear:
            return ops.pack_linear((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype))

        layers = [
            ops.LayerWeights(
                attn_norm=torch.ones(HIDDEN),
                qkv=linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                o=linear(HIDDEN, HEADS * DIM),
                mlp_norm=torch.ones(HIDDEN),
                gate_up=linear(2 * MIDDLE, HIDDEN),
                down=linear(HIDDEN, MIDDLE),
                heads=HEADS,
                kv_heads=KV_HEADS,
                head_dim=DIM,
                eps=1e-5,
                scale=DIM**-0.5,
            )
            for _ in range(LAYERS)
        ]
        return cls(layers, linear(VOCAB, HIDDEN))

    @property
    def layer_bytes(self) -> int:
        return sum(w.nbytes for layer in self.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))


def bench_model(seconds: float, dtype: torch.dtype) -> None:
    model = Model.random(dtype)
    name = str(dtype).removeprefix("torch.")
    layer_flop = 2e-9 * model.layer_bytes / dtype.itemsize
    norm, memory = torch.ones(HIDDEN), torch.ones(64 << 20)
    for label, context, rows, tree in (
        ("1 token", 256, 1, False),
        ("1 token", 1024, 1, False),
        ("tree of 4", 256, 4, True),
        ("tree of 16", 256, 16, True),
        ("tree of 64", 256, 64, True),
        ("prefill 1000", 0, 1000, False),
    ):
        plan, pages = session_plan(context, rows, tree)
        shape = (pages, KV_HEADS, DIM, PAGE), (pages, KV_HEADS, PAGE, DIM)
        caches = [(torch.randn(shape[0]).to(dtype), torch.randn(shape[1]).to(dtype)) for _ in range(LAYERS)]
        hidden = torch.randn(rows, HIDDEN)
        angles = torch.outer(plan.positions.float(), 1e-4 ** (torch.arange(0, DIM, 2) / DIM)).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()

        def step() -> torch.Tensor:
            out = ops.decoder_layers(hidden, model.layers, cos, sin, caches, plan)  # noqa: B023
            return model.head(ops.rms_norm(out[-64:] if tree else out[-1:], norm, 1e-5))  # noqa: B023

        result, read = measure(seconds, step, memory.sum)
        title = f"SmolLM2 {name}, {label}, context {context}"
        if rows == 1:
            row(title, result, (model.layer_bytes + model.head.nbytes) / 1e9, "GB/s")
            row("  torch's sum of 256 MB meanwhile", read, memory.nbytes / 1e9, "GB/s")
        else:
            row(title, result, layer_flop * rows + (2e-9 * HIDDEN * VOCAB * rows if tree else 0), "GFLOP/s")


def bench_linear(seconds: float) -> None:
    for outputs, inputs in ((3072, 576), (576, 1536), (49152, 576), (4096, 4096), (4096, 11008)):
        for rows in (1, 16, 512):
            x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
            half = weight.bfloat16()
            packed, packed_wide = ops.pack_linear(half), ops.pack_linear(weight)
            x_half = x.bfloat16()
            works: dict[str, Callable[[], object]] = {
                "ours, bf16 weights": lambda: packed(x),  # noqa: B023
                "ours, fp32 weights": lambda: packed_wide(x),  # noqa: B023
                "torch fp32": lambda: F.linear(x, weight),  # noqa: B023
            }
            if rows < 512:
                works["torch bf16"] = lambda: F.linear(x_half, half)  # noqa: B023
            for title, result in zip(works, measure(seconds, *works.values()), strict=True):
                row(f"{outputs} x {inputs}, {rows} rows, {title}", result, 2e-9 * rows * outputs * inputs, "GFLOP/s")


def bench_attention(seconds: float) -> None:
    for context, rows in ((256, 1), (256, 16), (1024, 16), (4096, 1), (4096, 16), (4096, 64)):
        plan, pages = session_plan(context, rows, tree=True)
        dtype = torch.bfloat16
        k_pages, v_pages = torch.randn(pages, KV_HEADS, DIM, PAGE), torch.randn(pages, KV_HEADS, PAGE, DIM)
        k_pages, v_pages = k_pages.to(dtype), v_pages.to(dtype)
        q, k, v = (torch.randn(rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        keys = context + rows
        mask = torch.ones(rows, keys, dtype=torch.bool)
        mask[:, context:] = torch.tril(torch.ones(rows, rows, dtype=torch.bool))
        shapes = ((HEADS, rows), (KV_HEADS, keys), (KV_HEADS, keys))
        dense = [torch.randn(1, heads, n, DIM).to(dtype) for heads, n in shapes]
        ours, theirs = measure(
            seconds,
            lambda: ops.attend(q, k, v, k_pages, v_pages, plan, DIM**-0.5),  # noqa: B023
            lambda: F.scaled_dot_product_attention(*dense, attn_mask=mask, enable_gqa=True),  # noqa: B023
        )
        flop = 4e-9 * rows * HEADS * DIM * keys
        row(f"tree of {rows}, context {context}, ours", ours, flop, "GFLOP/s")
        row(f"tree of {rows}, context {context}, torch with a mask", theirs, flop, "GFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each line is measured")
    parser.add_argument("--only", choices=("model", "linear", "attention"))
    parser.add_argument("--use", default="best", help="avx512, avx2, generic or reference")
    args = parser.parse_args()
    ops.use(args.use)
    ops.set_threads(args.threads)
    torch.manual_seed(0)
    print(f"{ops.describe()}, {args.threads} threads\n\n{'':<44} {'least ms':>9} {'median ms':>9}")
    with torch.inference_mode():
        if args.only in (None, "model"):
            for dtype in (torch.bfloat16, torch.float32):
                bench_model(args.seconds, dtype)
        if args.only in (None, "attention"):
            bench_attention(args.seconds)
        if args.only in (None, "linear"):
            bench_linear(args.seconds)


if __name__ == "__main__":
    main()
