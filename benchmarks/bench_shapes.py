"""A step in the shapes of released models beside llama.cpp on the very same random weights, and the memory bound.

    python benchmarks/bench_shapes.py [--shape NAME] [--format NAME] [--use NAME] ...

For each shape and format a GGUF file is written and both sides read it: one process of llama.cpp for each instruction
set, built for that and no more, ours held to the same. Everything in a line is measured in turn, so a busy machine
slows all of it; torch's sum of 512 MB is in every round, and the bound is the bytes that a step of ours must read over
that speed. Targets that are missed are named at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from kernel_timing import Timed, measure, table, tree_plan, wall
from llama_cpp_build import INSTRUCTIONS, environment
from llama_cpp_process import llama_cpp
from random_gguf import FORMATS, SHAPES, write

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES, physical_cores
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

CONTEXT = 256
ROWS = (1, 4, 16, 64)
OURS = {"BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_K": "int4"}
AGAINST_LLAMA = {1: 1.0, 16: 0.7}
AGAINST_BOUND = {1: 1.3}
HEADER = "format | instructions | rows | ours, ms | llama.cpp, ms | bound, ms | memory, GB/s | ours / llama.cpp | ours / bound"  # noqa: E501
SAME_MODEL = 0.95  # cosine of the logits
_SUMMED = 1 << 29  # bytes


@dataclass(frozen=True)
class Ours:
    """A loaded model of ours: a step by its number of rows, the bytes it reads, and the logits of the next token."""

    steps: dict[int, Timed]
    nbytes: int
    logits: Callable[[], torch.Tensor]


def ours(model: Path, dtype: torch.dtype, rows: tuple[int, ...]) -> Ours:
    """One step, tokens to logits of all rows: a binary tree on CONTEXT tokens."""
    source = GgufSource(model)
    span = load_span(source, LayerSpan(0, source.config.num_layers), dtype)
    assert isinstance(span, LlamaSpan)
    assert span.head is not None
    source.close()
    cache = span.new_cache(CONTEXT + max(rows))
    cache.open(b"s", CONTEXT)
    metadata = cache.schedule([StepRequest(b"s", 0, CONTEXT)])
    span.forward(span.embed(list(range(1000, 1000 + CONTEXT))), metadata, cache)

    def work(count: int) -> Callable[[], torch.Tensor]:
        plan, _ = tree_plan(CONTEXT, count)
        tokens = list(range(1000 + CONTEXT, 1000 + CONTEXT + count))
        return lambda: span.logits(span.forward(span.embed(tokens), plan, cache))

    layers = sum(weights.nbytes for weights in span.weights)
    keys = CONTEXT * span.kv_bytes_per_token_per_layer * len(span.layers)
    return Ours({count: wall(work(count)) for count in rows}, layers + span.head.nbytes + keys, work(1))


def bench(model: Path, weights: str, args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """-> (lines, missed targets) of one file."""
    dispatch.select_isa("best")
    model_of_ours = ours(model, DTYPES[OURS[weights]], tuple(args.rows))
    memory = torch.ones(_SUMMED >> 2)
    lines, missed = [], []
    for name in args.use:
        dispatch.select_isa(name)
        with llama_cpp(model, args.threads, CONTEXT, args.rows, environment(name)) as theirs:
            if theirs is None:
                raise SystemExit("llama.cpp does not start")
            check(model_of_ours.logits()[0], theirs.logits())
            for rows in args.rows:
                works = {"ours": model_of_ours.steps[rows], "theirs": theirs.steps[rows], "sum": wall(memory.sum)}
                pairs = measure(args.seconds, works)
                share = model_of_ours.nbytes / _SUMMED  # of the sum's time: the bound
                ratio, above = pairs.ratio("ours", "theirs"), pairs.ratio("ours", "sum") / share
                took = f"{pairs.median('ours'):.1f} | {pairs.median('theirs'):.1f} | {share * pairs.median('sum'):.1f}"
                speed = _SUMMED / 1e6 / pairs.median("sum")
                lines.append(f"{weights} | {name} | {rows} | {took} | {speed:.0f} | {ratio:.2f} | {above:.2f}")
                print(lines[-1], file=sys.stderr, flush=True)
                if ratio > AGAINST_LLAMA.get(rows, 1.0):
                    missed.append(f"{weights}, {name}, {rows} rows: {ratio:.2f} of llama.cpp's time")
                if above > AGAINST_BOUND.get(rows, float("inf")):
                    missed.append(f"{weights}, {name}, {rows} rows: {above:.2f} times the bound")
    return lines, missed


def check(logits: torch.Tensor, theirs: list[float]) -> None:
    """That both compute the same model: a benchmark of something else would be worth nothing."""
    likeness = torch.nn.functional.cosine_similarity(logits[: len(theirs)].float(), torch.tensor(theirs), 0)
    if not likeness > SAME_MODEL:
        raise SystemExit(f"the logits of llama.cpp and ours are alike by {float(likeness):.3f} only")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each cell is measured")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="this one; repeatable")
    parser.add_argument("--format", choices=FORMATS, action="append", help="this one; repeatable")
    parser.add_argument("--use", choices=INSTRUCTIONS, action="append", help="hold both sides to these instructions")
    parser.add_argument("--rows", type=int, action="append", help="of a step; repeatable")
    parser.add_argument("--files", type=Path, help="keep the models in this folder, for the next run")
    args = parser.parse_args()
    args.rows = args.rows or list(ROWS)
    args.use = args.use or _available()
    dispatch.set_threads(args.threads)
    missed: list[str] = []
    with ExitStack() as stack, torch.inference_mode():
        folder = args.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for shape in args.shape or SHAPES:
            lines: list[str] = []
            for weights in args.format or FORMATS:
                model = folder / f"{shape.replace(' ', '-')}-{weights}.gguf"
                if not model.exists():
                    write(model.with_suffix(".part"), SHAPES[shape], weights).rename(model)
                found, misses = bench(model, weights, args)
                lines += found
                missed += (f"{shape}, {miss}" for miss in misses)
                if not args.files:
                    model.unlink()
            print(f"\n{shape}, context {CONTEXT}, {args.threads} threads\n\n{table(HEADER, lines)}", flush=True)
    print("\nTargets missed: " + ("none" if not missed else "".join(f"\n- {line}" for line in missed)))


def _available() -> list[str]:
    """The instruction sets of `INSTRUCTIONS` that this machine has."""
    if dispatch.isa() not in INSTRUCTIONS:
        raise SystemExit(f"this machine computes with {dispatch.isa()}, and llama.cpp is built for AVX2 and wider only")
    best = list(INSTRUCTIONS).index(dispatch.isa())
    return list(INSTRUCTIONS)[: best + 1]


if __name__ == "__main__":
    main()
