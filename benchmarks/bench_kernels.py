"""The CPU kernels beside what else there is, in one run: `python benchmarks/bench_kernels.py`, Markdown tables out.

Everything in a row of a table is measured in turn, so a busy machine slows all of it. Targets that are missed are
named at the end.
"""

from __future__ import annotations

import argparse
import os
import sys

import kernel_attention
import kernel_linear
import kernel_model
import kernel_perplexity
import torch
from kernel_timing import read_bandwidth

from swarm_kernels.device.device import physical_cores
from swarm_kernels.models.open import open_model
from swarm_kernels.ops import dispatch

PARTS = ("attention", "linear", "model", "perplexity")
HELD = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
}
"""What holds torch, oneDNN and MKL to an instruction set: the values of `_VARIABLES`."""
_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def hold_torch(instructions: str) -> None:
    """Start this program anew if torch, which is loaded already, may use more than we do."""
    wanted = dict(zip(_VARIABLES, HELD.get(instructions, ()), strict=False))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each cell is measured")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; repeatable")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out, which compiles for minutes")
    parser.add_argument("--use", default="best", help="avx512bf16, avx512vnni, avx512, avx2, generic or reference")
    parser.add_argument("--free-torch", action="store_true", help="hold ours to --use, and torch to nothing")
    args = parser.parse_args()
    if not args.free_torch:
        hold_torch(args.use)
    parts = args.only or PARTS
    dispatch.select_isa(args.use)
    dispatch.set_threads(args.threads)
    torch.manual_seed(0)
    missed: list[str] = []
    with torch.inference_mode():
        bandwidth = read_bandwidth()
        print(f"{dispatch.describe()}, {args.threads} threads, memory read at {bandwidth:.1f} GB/s")
        if "attention" in parts:
            result, misses = kernel_attention.bench(args.seconds, bandwidth, not args.no_flex)
            missed += misses
            print(f"\nAttention, bf16, µs a call\n\n{result}")
        if "linear" in parts:
            print(f"\nLinear layers, µs a call\n\n{kernel_linear.bench(args.seconds)}")
        source = open_model("smollm2-135m")
        if "model" in parts:
            result, misses = kernel_model.bench(source, args.seconds, args.threads)
            missed += misses
            print(f"\nSmolLM2-135M, context {kernel_model.CONTEXT}, ms a step\n\n{result}")
        if "perplexity" in parts:
            print(f"\n{kernel_perplexity.bench(source)}")
    print("\nTargets missed: " + ("none" if not missed else "".join(f"\n- {line}" for line in missed)))


if __name__ == "__main__":
    main()
