"""Ahead-of-time compilation of the kernels for GPUs that are not present, to check that they compile and fit.

`python -m swarm_kernels.ops.triton.aot_compile 80 90` prints a line per kernel. Needs only Triton, whose wheel contains
the assembler. Owns a representative set of kernel variants; uses no device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swarm_kernels.batch import BLOCK_SIZE
from swarm_kernels.ops.triton import attention, attention_kernels, cache_kernels, row_kernels

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory per thread block by compute capability (CUDA programming guide, technical specifications); its keys are
the targets checked."""

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with everything it is specialized for."""

    title: str
    kernel: Any
    types: Mapping[str, str]  # of the arguments that are not constant
    constants: Mapping[str, object]
    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant compiled for one target."""

    title: str
    capability: int
    shared_bytes: int
    cubin: bytes


def variants() -> Iterator[Variant]:
    """Every kernel; attention for each dtype and the head sizes that need the most shared memory."""
    for dtype in _NAMES:
        for dim in (64, 128, 256):
            heads = attention.AttentionShape(32, 8, dim)
            yield _attend(heads, dtype, block_m=16, split=True, extras=False)
        yield _attend(
            attention.AttentionShape(8, 1, 80), dtype, block_m=32 if dtype == torch.float32 else 64, split=False
        )
        yield _norm_rope_and_cache(dtype)
        yield _row_kernel("add_rms_norm", row_kernels.add_rms_norm, dtype)
    yield _attend(attention.AttentionShape(16, 4, 256), torch.bfloat16, block_m=64, split=False)
    yield _row_kernel("silu_times", row_kernels.silu_times, torch.bfloat16)
    yield _cut_tiles()
    yield _merge_splits()
    yield _commit_tree_slots()


def compile_for(variant: Variant, capability: int) -> Compiled:
    """Compile to machine code. Triton's exceptions pass through: a kernel that does not compile is our bug."""
    source = ASTSource(
        variant.kernel,
        signature={name: variant.types.get(name, "constexpr") for name in variant.kernel.arg_names},
        constexprs=dict(variant.constants),
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(variant.kernel.arg_names)
            if variant.types.get(name, "").startswith("*") and name in _ALIGNED
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(variant.options))
    return Compiled(variant.title, capability, compiled.metadata.shared, compiled.asm["cubin"])


_ALIGNED = frozenset(
    ("k_blocks", "v_blocks", "out", "q_out", "sums", "stats", "x", "delta", "weight", "total", "gate_up")
)


def _attend(
    heads: attention.AttentionShape, dtype: torch.dtype, block_m: int, split: bool, extras: bool = True
) -> Variant:
    name = _NAMES[dtype]
    data = {"q": f"*{name}", "k_blocks": f"*{name}", "v_blocks": f"*{name}", "stats": "*fp32"}
    tables = dict.fromkeys(("sequence_index", "context_lens", "block_tables", "tree_block_tables", "tiles"), "*i32")
    counts = dict.fromkeys(("rows", "max_blocks", "max_tree_blocks", "words", "window", "q_stride"), "i32")
    return Variant(
        title=f"attend {name}, head {heads.head_dim}, tile {block_m}{', split' if split else ''}",
        kernel=attention_kernels.attend_tiles,
        types={
            **data, **tables, **counts, "out": "*fp32" if split else f"*{name}", "positions": "*i64",
            "tree_mask": "*i64", "scale": "fp32", "cap": "fp32",
        },
        constants={
            "KV_HEADS": heads.kv_heads, "QUERIES_PER_KV": heads.queries_per_kv, "D": heads.head_dim,
            "BLOCK_D": heads.block_d,
            "BLOCK_M": block_m, "BLOCK_N": attention.block_n(heads, dtype), "BLOCK_SIZE": BLOCK_SIZE, "SPLIT": split,
            "WINDOWED": extras, "CAPPED": extras, "DOT": attention.dot_type(dtype),
        },
        options=attention.launch_options(heads, dtype, block_m),
    )  # fmt: skip


def _norm_rope_and_cache(dtype: torch.dtype) -> Variant:
    data = dict.fromkeys(("q", "k", "v", "q_out", "k_blocks", "v_blocks"), f"*{_NAMES[dtype]}")
    tables = dict.fromkeys(("cos", "sin", "q_norm", "k_norm"), "*fp32")
    counts = dict.fromkeys(("q_stride", "k_stride", "v_stride", "rot"), "i32")
    return Variant(
        f"norm_rope_and_cache {_NAMES[dtype]}",
        cache_kernels.norm_rope_and_cache,
        {**data, **tables, **counts, "slot_mapping": "*i64", "eps": "fp32"},
        {
            "HEADS": 9,
            "KV_HEADS": 3,
            "D": 80,
            "BLOCK_D": 128,
            "BLOCK_SIZE": BLOCK_SIZE,
            "ROPE": True,
            "NORM_Q": True,
            "NORM_K": True,
        },
        {"num_warps": 1},
    )


def _row_kernel(title: str, kernel: Any, dtype: torch.dtype) -> Variant:
    data = {name: f"*{_NAMES[dtype]}" for name in kernel.arg_names if name in ("x", "delta", "total", "out", "gate_up")}
    norm = {"weight": "*fp32", "eps": "fp32"} if "weight" in kernel.arg_names else {}
    constants = {"WIDTH": 4096, "BLOCK": 4096, "ADD": True}
    return Variant(
        f"{title} {_NAMES[dtype]}",
        kernel,
        {**data, **norm},
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        {"num_warps": 8},
    )


def _cut_tiles() -> Variant:
    types = {"sequence_index": "*i32", "tiles": "*i32", "rows": "i32"}
    return Variant("cut_tiles", attention_kernels.cut_tiles, types, {"TILE": 5, "BLOCK": 1024}, {})


def _merge_splits() -> Variant:
    types = {"sums": "*fp32", "stats": "*fp32", "out": "*bf16", "items": "i32"}
    return Variant("merge_splits", attention_kernels.merge_splits, types, {"D": 128, "BLOCK_D": 128, "SPLITS": 64}, {})


def _commit_tree_slots() -> Variant:
    types = {"k_blocks": "*bf16", "v_blocks": "*bf16", "copy_from": "*i64", "copy_to": "*i64", "count": "i32"}
    constants = {"KV_HEADS": 8, "D": 128, "BLOCK_SIZE": BLOCK_SIZE, "BLOCK_C": 512, "BLOCK_D": 16}
    return Variant("commit_tree_slots", cache_kernels.commit_tree_slots, types, constants, {})


def sample(capability: int) -> Iterator[Variant]:
    """A quick sample: one attention variant, different per target, and on the first target every other kernel."""
    attends = [variant for variant in variants() if variant.kernel is attention_kernels.attend_tiles]
    index = list(SHARED_BYTES).index(capability)
    yield attends[(5 * index + 1) % len(attends)]
    if index == 0:
        seen: set[Any] = {attention_kernels.attend_tiles}
        for variant in variants():
            if variant.kernel not in seen:
                seen.add(variant.kernel)
                yield variant


def main() -> None:
    """Command line. Exits with 3 where Triton has no assembler for these GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", type=int, nargs="*", metavar="80", help=f"of {[*SHARED_BYTES]}")
    parser.add_argument("--sample", action="store_true", help="a sample of the variants")
    arguments = parser.parse_args()
    unknown = set(arguments.capabilities) - set(SHARED_BYTES)  # argparse's `choices` reject an empty list
    if unknown:
        parser.error(f"no target of these: {', '.join(map(str, sorted(unknown)))}")
    try:
        _ = knobs.nvidia.ptxas.path  # the property searches for it
    except RuntimeError as error:
        sys.stderr.write(f"Triton has no assembler here: {error}\n")
        sys.exit(3)
    for capability in arguments.capabilities or SHARED_BYTES:
        for variant in sample(capability) if arguments.sample else variants():
            done = compile_for(variant, capability)
            used = f"{done.shared_bytes / 1024:>6.1f} KiB shared of {SHARED_BYTES[capability] >> 10}"
            sys.stdout.write(f"sm_{capability}  {done.title:<44} {used}\n")


if __name__ == "__main__":
    main()
