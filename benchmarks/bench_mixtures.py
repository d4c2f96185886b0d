"""Layers of mixtures of experts beside llama.cpp with the same random weights: `python benchmarks/bench_mixtures.py`.

Every cell of a row is measured in turn, tokens to logits of all rows, each step with other tokens, so that it reads
other experts; the bound is the bytes that ours have to read (attention, the experts that the rows chose, the head, keys
and values) over the speed at which torch sums a gigabyte. Targets that are missed are named at the end.

llama.cpp runs in the Python that SWARM_LLAMA_PYTHON names, else in this one; one that is built for AVX2 alone
(CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON") goes with `--use avx2`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import torch
from kernel_timing import Timed, measure, table, tree_plan, wall
from llama_cpp_process import is_installed, llama_cpp
from mixture_files import SHAPES, VOCABULARY, Shape, write

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES, available_memory, physical_cores
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.layer_weights import Experts, Mixture
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

FORMATS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Ours, and what the file has."""
ROWS = (1, 4, 16, 64)
CONTEXT = 256
UNIONS = 4  # steps whose experts are counted
TARGETS = {1: 1.0, 16: 0.7}  # of llama.cpp's time, by rows
BOUND = 1.3  # of one row
_SUMMED = 1 << 30
HEADER = "rows | experts read | ms | llama.cpp | / llama.cpp | / bound"


class _Counted:
    """Experts that note which were chosen. Plain torch runs a layer that has them."""

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

    def union(self, rows: int) -> float:
        """Experts that a step of so many rows reads, the mean over layers and a few steps."""
        counted, weights = [], []
        for layer in self.span.weights:
            assert isinstance(layer.mlp, Mixture)
            counted.append(_Counted(layer.mlp.experts))
            weights.append(replace(layer, mlp=replace(layer.mlp, experts=counted[-1])))
        step = step_of(replace(self.span, weights=weights), rows)
        for _ in range(UNIONS):
            step()
        return sum(sum(each.chosen) for each in counted) / (UNIONS * len(counted))

    def bytes_read(self, rows: int, union: float) -> float:
        """In one step."""
        assert self.span.head is not None
        total = float(self.span.head.nbytes) + self.span.kv_bytes_per_token_per_layer * CONTEXT * len(self.span.weights)
        for layer in self.span.weights:
            mixture = layer.mlp
            assert isinstance(mixture, Mixture)
            total += layer.attention.nbytes + mixture.nbytes - mixture.experts.nbytes
            total += union * mixture.experts.nbytes / mixture.experts.count
        return total


def step_of(span: LlamaSpan, rows: int) -> Timed:
    """A binary tree of so many rows on CONTEXT tokens, other tokens each time."""
    cache = span.new_cache(CONTEXT + max(ROWS))
    cache.open(b"s", CONTEXT)
    prompt = [token % VOCABULARY for token in range(CONTEXT)]
    span.forward(span.embed(prompt), cache.schedule([StepRequest(b"s", 0, CONTEXT)]), cache)
    metadata, _ = tree_plan(CONTEXT, rows)
    turn = iter(range(1 << 62))

    def step() -> object:
        first = next(turn) * rows
        tokens = [(first + row) % VOCABULARY for row in range(rows)]
        return span.logits(span.forward(span.embed(tokens), metadata, cache))

    return wall(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each cell is measured")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="this shape; repeatable")
    parser.add_argument("--format", choices=FORMATS, action="append", help="this format; repeatable")
    parser.add_argument("--use", default="best", help="avx512bf16, avx512vnni, avx512, avx2 or generic")
    args = parser.parse_args()
    dispatch.select_isa(args.use)
    dispatch.set_threads(args.threads)
    torch.manual_seed(0)
    print(f"{dispatch.describe()}, {args.threads} threads, context {CONTEXT}, ms a step of {args.layers} layers")
    missed = []
    for name in args.shape or SHAPES:
        for kind in args.format or FORMATS:
            with torch.inference_mode():
                result, misses = bench(SHAPES[name], args.layers, kind, args.seconds, args.threads)
            print(f"\n{name}, {kind} beside {FORMATS[kind]}\n\n{result}", flush=True)
            missed += [f"{name}, {kind}, {miss}" for miss in misses]
    print("\nTargets missed: " + ("none" if not missed else "".join(f"\n- {line}" for line in missed)))


def bench(shape: Shape, layers: int, kind: str, seconds: float, threads: int) -> tuple[str, list[str]]:
    """-> (table, missed targets)."""
    memory = torch.ones(_SUMMED >> 2)
    lines, missed = [], []
    with _models(shape, layers, kind, threads) as (ours, theirs):
        for rows in ROWS:
            works = {"ours": step_of(ours.span, rows), "sum": wall(memory.sum)}
            if theirs is not None:
                works["theirs"] = theirs[rows]
            union = ours.union(rows)
            torch.set_num_threads(threads)  # of the sum
            pairs = measure(seconds, works)
            bound = pairs.ratio("ours", "sum") * _SUMMED / ours.bytes_read(rows, union)
            against = pairs.ratio("ours", "theirs") if theirs is not None else None
            cells = ("not installed",) * 2
            if against is not None:
                cells = f"{pairs.median('theirs'):.2f}", f"{against:.2f}"
            lines.append(f"{rows} | {union:.1f} | {pairs.median('ours'):.2f} | {cells[0]} | {cells[1]} | {bound:.2f}")
            if against is not None and against > TARGETS.get(rows, against):
                missed.append(f"{rows} rows: {against:.2f} of llama.cpp's time, not {TARGETS[rows]}")
            if rows == 1 and bound > BOUND:
                missed.append(f"one row: {bound:.2f} times the bound, not {BOUND}")
    return table(HEADER, lines), missed


@contextmanager
def _models(shape: Shape, layers: int, kind: str, threads: int) -> Iterator[tuple[Ours, dict[int, Timed] | None]]:
    """Ours, and llama.cpp's steps if it is installed, of one file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(shape, layers, gguf.GGMLQuantizationType[FORMATS[kind]], path)
        if 2.2 * path.stat().st_size > available_memory(torch.device("cpu")):
            raise SystemExit(f"{path.stat().st_size >> 30} GiB of weights do not fit twice; use fewer --layers")
        source = GgufSource(path)
        span = load_span(source, LayerSpan(0, layers), DTYPES[kind])
        source.close()
        assert isinstance(span, LlamaSpan)
        if not is_installed():
            yield Ours(span), None
            return
        with llama_cpp(path, threads, CONTEXT, ROWS) as theirs:
            yield Ours(span), theirs


if __name__ == "__main__":
    main()
