"""Layers of mixtures of experts beside llama.cpp with the same random weights, and the bound of the memory they read.

    python benchmarks/bench_mixtures.py [--shape NAME] [--format NAME] [--use NAME] ...

For each shape and format a GGUF file of a few layers is written and both sides read it, each held to the same
instruction set (`llama_cpp_build`). Everything in a line is measured in turn, tokens to logits of all rows, each step
with other tokens, so that it reads other experts. The bound is what a step of ours must read (attention, routers, the
experts that the rows chose, keys, values and the head) over the speed at which torch sums a gigabyte in the same
rounds. Targets that are missed are named at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count as count_from
from pathlib import Path

import torch
from bench_shapes import check
from gguf import GGMLQuantizationType as Kind
from kernel_timing import Timed, measure, table, tree_plan, wall
from llama_cpp_build import INSTRUCTIONS, environment
from llama_cpp_process import llama_cpp, other_tokens
from mixture_files import SHAPES, VOCABULARY, write

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES, available_memory, physical_cores
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.layer_weights import Experts, Mixture
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

CONTEXT = 256
ROWS = (1, 4, 16, 64)
OURS = {"BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_K": "int4"}
LACKING = {("gpt-oss-20b", "Q4_K")}  # its rows are no multiple of 256
AGAINST_LLAMA = {1: 1.0, 16: 0.7}
AGAINST_BOUND = {1: 1.3}
HEADER = (
    "format | instructions | rows | experts read | ours, ms | llama.cpp, ms | memory, GB/s | ours / llama.cpp | "
    "ours / bound"
)
UNIONS = 4  # steps whose experts are counted
_SUMMED = 1 << 30


class _Counted:
    """Experts that note how many were chosen. Plain torch runs a layer that has them."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.count, self.hidden, self.nbytes = experts.count, experts.hidden, experts.nbytes
        self.chosen: list[int] = []

    def __call__(self, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.chosen.append(len(set(index.flatten().tolist())))
        return self._experts(x, index, scores)


@dataclass(frozen=True)
class Ours:
    span: LlamaSpan
    steps: dict[int, Timed]
    unions: dict[int, float]  # experts that a layer reads, by the number of rows

    @classmethod
    def load(cls, model: Path, dtype: torch.dtype, rows: list[int]) -> Ours:
        source = GgufSource(model)
        span = load_span(source, LayerSpan(0, source.config.num_layers), dtype)
        source.close()
        assert isinstance(span, LlamaSpan)
        steps = steps_of(span, rows)
        return cls(span, steps, {count: _union(span, count) for count in rows})

    def bytes_read(self, rows: int) -> float:
        """By a step of so many rows."""
        assert self.span.head is not None
        total = float(self.span.head.nbytes)
        total += self.span.kv_bytes_per_token_per_layer * CONTEXT * len(self.span.weights)
        for layer in self.span.weights:
            assert isinstance(layer.mlp, Mixture)
            experts = layer.mlp.experts
            total += layer.attention.nbytes + layer.mlp.nbytes - experts.nbytes
            total += self.unions[rows] * experts.nbytes / experts.count
        return total

    def logits(self) -> torch.Tensor:
        """Of the token that llama.cpp's process is asked for."""
        return _step(self.span, 1)([1000 + CONTEXT])[0]


def steps_of(span: LlamaSpan, rows: list[int]) -> dict[int, Timed]:
    """A step by its number of rows, as a binary tree on CONTEXT tokens, other tokens each time."""

    def work(count: int) -> Timed:
        step, turns = _step(span, count), count_from(0)
        return wall(lambda: step(list(other_tokens(next(turns), count, VOCABULARY))))

    return {count: work(count) for count in rows}


def _step(span: LlamaSpan, rows: int) -> Callable[[list[int]], torch.Tensor]:
    """-> tokens -> their logits."""
    cache = span.new_cache(CONTEXT + max(rows, 16))
    cache.open(b"s", CONTEXT)
    prompt = list(range(1000, 1000 + CONTEXT))
    span.forward(span.embed(prompt), cache.schedule([StepRequest(b"s", 0, CONTEXT)]), cache)
    plan, _ = tree_plan(CONTEXT, rows)
    return lambda tokens: span.logits(span.forward(span.embed(tokens), plan, cache))


def _union(span: LlamaSpan, rows: int) -> float:
    """Experts that a step of so many rows reads, the mean over layers and a few steps."""
    counted, weights = [], []
    for layer in span.weights:
        assert isinstance(layer.mlp, Mixture)
        counted.append(_Counted(layer.mlp.experts))
        weights.append(replace(layer, mlp=replace(layer.mlp, experts=counted[-1])))
    step = steps_of(replace(span, weights=weights), [rows])[rows]
    for each in counted:
        each.chosen.clear()  # of the prompt
    for _ in range(UNIONS):
        step()
    return sum(sum(each.chosen) for each in counted) / (UNIONS * len(counted))


def bench(model: Path, weights: str, args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """-> (lines, missed targets) of one file."""
    dispatch.select_isa("best")
    ours = Ours.load(model, DTYPES[OURS[weights]], args.rows)
    memory = torch.ones(_SUMMED >> 2)
    lines, missed = [], []
    for name in args.use:
        dispatch.select_isa(name)
        with llama_cpp(model, args.threads, CONTEXT, args.rows, environment(name), VOCABULARY) as theirs:
            if theirs is None:
                raise SystemExit("llama.cpp does not start")
            check(ours.logits(), theirs.logits())
            for rows in args.rows:
                works = {"ours": ours.steps[rows], "theirs": theirs.steps[rows], "sum": wall(memory.sum)}
                pairs = measure(args.seconds, works)
                ratio = pairs.ratio("ours", "theirs")
                above = pairs.ratio("ours", "sum") * _SUMMED / ours.bytes_read(rows)
                took = f"{pairs.median('ours'):.1f} | {pairs.median('theirs'):.1f}"
                speed = _SUMMED / 1e6 / pairs.median("sum")
                lines.append(
                    f"{weights} | {name} | {rows} | {ours.unions[rows]:.1f} | {took} | {speed:.0f} | {ratio:.2f} | "
                    f"{above:.2f}"
                )
                print(lines[-1], file=sys.stderr, flush=True)
                if ratio > AGAINST_LLAMA.get(rows, ratio):
                    missed.append(f"{weights}, {name}, {rows} rows: {ratio:.2f} of llama.cpp's time")
                if above > AGAINST_BOUND.get(rows, above):
                    missed.append(f"{weights}, {name}, {rows} rows: {above:.2f} times the bound")
    return lines, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each cell is measured")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="this one; repeatable")
    parser.add_argument("--format", choices=OURS, action="append", help="this one; repeatable")
    parser.add_argument("--use", choices=INSTRUCTIONS, action="append", help="hold both sides to these instructions")
    parser.add_argument("--rows", type=int, action="append", help="of a step; repeatable")
    args = parser.parse_args()
    args.rows = args.rows or list(ROWS)
    args.use = args.use or sorted({dispatch.isa(), "avx2"})
    dispatch.set_threads(args.threads)
    missed: list[str] = []
    with ExitStack() as stack, torch.inference_mode():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for shape in args.shape or SHAPES:
            lines: list[str] = []
            for weights in args.format or [name for name in OURS if (shape, name) not in LACKING]:
                model = write(folder / f"{weights}.gguf", SHAPES[shape], args.layers, Kind[weights])
                if 1.2 * model.stat().st_size > available_memory(torch.device("cpu")):
                    raise SystemExit(f"{model.stat().st_size >> 30} GiB of weights do not fit; use fewer --layers")
                found, misses = bench(model, weights, args)
                lines += found
                missed += (f"{shape}, {miss}" for miss in misses)
                model.unlink()
            heading = f"{args.layers} layers of {shape}, context {CONTEXT}, {args.threads} threads"
            print(f"\n{heading}\n\n{table(HEADER, lines)}", flush=True)
    print("\nTargets missed: " + ("none" if not missed else "".join(f"\n- {line}" for line in missed)))


if __name__ == "__main__":
    main()
