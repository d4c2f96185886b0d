"""The GPU kernels beside torch's, and whole models against the memory bound: `python benchmarks/bench_kernels_gpu.py`.

Prints GitHub tables for the GPU it runs on. Weights are random: no model is needed. Exits with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from kernel_timing import Pairs, Timed, binary_tree, in_turn, measure, table, tree_plan

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.device.device import DTYPES
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.triton import selector

CONTEXTS = (256, 1024, 4096, 16384)
TREES = (1, 4, 16, 64)
SHAPES = ((9, 3, 64), (32, 8, 128))  # heads, key heads, head size: SmolLM2's and Llama 3's
COLD_BYTES = 512 << 20  # keys and values to go through before any is read again: more than the L2 holds
WIDTHS = (1, 4, 16, 64)
OTHERS = ("SDPA with a mask", "FlexAttention")


@dataclass(frozen=True)
class Model:
    """A decoder's shapes."""

    name: str
    hidden: int
    heads: int
    groups: int
    dim: int
    middle: int
    layers: int


MODELS = (Model("SmolLM2-135M", 576, 9, 3, 64, 1536, 30), Model("Llama-3-8B", 4096, 32, 8, 128, 14336, 32))


def on_gpu(work: Callable[[], object]) -> Timed:
    """`work` timed by the GPU's own clock; the host's time to launch it counts only where the GPU waits for it."""

    def run() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return run


def bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes this GPU reads a second, by summing 2 GiB."""
    memory = torch.ones(1 << 29, device=device)
    return memory.nbytes / measure(seconds, {"sum": on_gpu(memory.sum)}).median("sum") * 1e3


def moved(plan: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    return AttentionMetadata(*(getattr(plan, name).to(device) for name in AttentionMetadata.__dataclass_fields__))


def attention_case(
    shape: tuple[int, int, int], context: int, rows: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> tuple[Pairs, int]:
    """-> (times of ours and torch's, bytes of keys and values)."""
    heads, groups, dim = shape
    keys = context + rows
    nbytes = 2 * keys * groups * dim * dtype.itemsize
    copies = max(2, min(64, -(-COLD_BYTES // nbytes)))
    plan, blocks = tree_plan(context, rows)
    plan = moved(plan, device)
    q = torch.randn(rows, heads, dim, dtype=dtype, device=device)
    k, v = torch.randn(2, rows, groups, dim, dtype=dtype, device=device).unbind()
    paged = [
        (
            torch.randn(blocks, groups, dim, BLOCK_SIZE, dtype=dtype, device=device),
            torch.randn(blocks, groups, BLOCK_SIZE, dim, dtype=dtype, device=device),
        )
        for _ in range(copies)
    ]
    dense = [torch.randn(2, 1, groups, keys, dim, dtype=dtype, device=device).unbind() for _ in range(copies)]
    query = torch.randn(1, heads, rows, dim, dtype=dtype, device=device)
    past = torch.ones(rows, context, dtype=torch.bool)
    tree = binary_tree(rows).to(device)
    mask = torch.cat((past.to(device), tree), 1)
    flex = _flex(query, tree, context, keys)
    works = {
        "ours": in_turn([partial(dispatch.attend, q, k, v, *blocks, plan, dim**-0.5) for blocks in paged]),
        OTHERS[0]: in_turn(
            [partial(F.scaled_dot_product_attention, query, d[0], d[1], mask, enable_gqa=True) for d in dense]
        ),
        OTHERS[1]: in_turn([partial(flex, *d) for d in dense]),
    }
    return measure(seconds, {name: on_gpu(work) for name, work in works.items()}), nbytes


def _flex(
    query: torch.Tensor, tree: torch.Tensor, context: int, keys: int
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """FlexAttention compiled for this shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key < context) | tree[row, (key - context).clamp(min=0)]

    mask = create_block_mask(visible, None, None, query.shape[2], keys, device=str(query.device))
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda k, v: compiled(query, k, v, block_mask=mask, enable_gqa=True)


def bench_attention(dtype: torch.dtype, device: torch.device, bytes_s: float, seconds: float) -> str:
    """Microseconds a call, keys and values in no cache."""
    rows = []
    for shape in SHAPES:
        for context in CONTEXTS:
            for tree in TREES:
                pairs, nbytes = attention_case(shape, context, tree, dtype, device, seconds)
                times = " | ".join(f"{1e3 * pairs.median(name):.1f}" for name in ("ours", *OTHERS))
                gain = min(pairs.ratio(name, "ours") for name in OTHERS)
                bound = 1e6 * nbytes / bytes_s
                name = f"{shape[0]}/{shape[1]} x {shape[2]}, {context}, {tree}"
                rows.append(f"{name} | {times} | {bound:.1f} | {gain:.1f} | {1e3 * pairs.median('ours') / bound:.1f}")
    header = ("heads, context, tree", "ours", *OTHERS, "bound", "best of torch / ours", "ours / bound")
    return table(" | ".join(header), rows)


def random_layers(model: Model, dtype: torch.dtype, device: torch.device) -> list[dispatch.LayerWeights]:
    def linear(outputs: int, inputs: int) -> dispatch.Linear:
        return dispatch.pack_linear(torch.randn(outputs, inputs, dtype=dtype, device=device) * inputs**-0.5)

    attended, shared = model.heads * model.dim, 2 * model.groups * model.dim
    return [
        dispatch.LayerWeights(
            dispatch.Attention(
                qkv=linear(attended + shared, model.hidden),
                o=linear(model.hidden, attended),
                heads=model.heads,
                kv_heads=model.groups,
                head_dim=model.dim,
                scale=model.dim**-0.5,
            ),
            dispatch.GatedMlp(linear(2 * model.middle, model.hidden), linear(model.hidden, model.middle)),
            attn_norm=torch.ones(model.hidden, device=device),
            mlp_norm=torch.ones(model.hidden, device=device),
            eps=1e-5,
        )
        for _ in range(model.layers)
    ]


def bench_model(model: Model, dtype: torch.dtype, device: torch.device, bytes_s: float, seconds: float) -> list[str]:
    """Rows of the table: all layers on a tree of each width after 256 tokens, the way nodes run them."""
    layers = random_layers(model, dtype, device)
    weights = sum(layer.nbytes for layer in layers)
    rows = []
    for width in WIDTHS:
        plan, blocks = tree_plan(256, width)
        plan = moved(plan, device)
        shapes = (blocks, model.groups, model.dim, BLOCK_SIZE), (blocks, model.groups, BLOCK_SIZE, model.dim)
        caches = [
            (torch.zeros(shapes[0], dtype=dtype, device=device), torch.zeros(shapes[1], dtype=dtype, device=device))
            for _ in layers
        ]
        hidden = torch.randn(width, model.hidden, dtype=dtype, device=device)
        angles = torch.randn(width, model.dim // 2, device=device).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()

        def step(
            hidden: torch.Tensor = hidden, cos: torch.Tensor = cos, sin: torch.Tensor = sin,
            caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = caches, plan: AttentionMetadata = plan,
        ) -> torch.Tensor:  # fmt: skip
            return dispatch.decoder_layers(hidden, layers, cos, sin, caches, plan)

        for _ in range(3):
            step()  # compiles, then captures
        ms = measure(seconds, {"ours": on_gpu(step)}).median("ours")
        read = weights + 2 * (256 + width) * model.groups * model.dim * dtype.itemsize * model.layers
        bound = 1e3 * read / bytes_s
        rows.append(f"{model.name}, {width} | {ms:.3f} | {1e3 * width / ms:.0f} | {bound:.3f} | {ms / bound:.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), action="append", help="both if not given")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each number is measured")
    parser.add_argument("--only", choices=("attention", "model"))
    arguments = parser.parse_args()
    if arguments.gpu >= torch.cuda.device_count():
        sys.stderr.write(f"GPU {arguments.gpu} is not here: this benchmark needs one that PyTorch can use.\n")
        sys.exit(2)
    device = torch.device("cuda", arguments.gpu)
    torch.manual_seed(0)
    with torch.inference_mode(), torch.cuda.device(device):
        bytes_s = bandwidth(device, arguments.seconds)
        print(f"{torch.cuda.get_device_name(device)}, {datetime.date.today()}, reads {bytes_s / 1e9:.0f} GB/s")
        for name in arguments.dtype or ("bf16", "fp16"):
            dtype = DTYPES[name]
            print(f"\n{name}, {selector.describe(device, dtype)}\n")
            if arguments.only != "model":
                print(bench_attention(dtype, device, bytes_s, arguments.seconds))
            if arguments.only != "attention":
                rows = [
                    row for model in MODELS for row in bench_model(model, dtype, device, bytes_s, arguments.seconds)
                ]
                print(table("model, rows | ms | rows/s | bound, ms | ours / bound", rows))


if __name__ == "__main__":
    main()
