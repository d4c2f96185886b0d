"""The compiled path beside transformers' layers: `python benchmarks/bench_families.py`, a Markdown table out.

Layers in the shapes of released models with random weights, after 256 tokens: one row, and a binary tree of 16. What is
in a row of the table is measured in turn.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Timed, measure, table, wall

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES, physical_cores
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.source import LocalFiles, NotQuantized
from swarm_kernels.models.tensor_shapes import expected_shapes
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.load import load_span

CONTEXT = 256
ROWS = (1, 16)
FORMATS = ("bf16", "int8", "int4")
MODELS: dict[str, dict[str, Any]] = {
    "Gemma 3 1B, 6 layers": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
    },
    "Phi-3 mini, 2 layers": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 2047,
    },
    "OLMo 2 7B, 2 layers": {
        "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 32,
    },
}  # fmt: skip


class ShapedSource(LocalFiles, NotQuantized):
    """A ModelSource of random bf16 weights."""

    def __init__(self, name: str, hf: dict[str, Any]) -> None:
        sizes = {"vocab_size": 1024, "max_position_embeddings": 8192, "tie_word_embeddings": True, "pad_token_id": None}
        self.config = model_config({**sizes, **hf})
        self.name, self.path, self.weight_hash = name, Path(), "0" * 32
        self._shapes = dict(expected_shapes(self.config, lambda _: False))
        self._values = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shapes))

    def has(self, hf_name: str) -> bool:
        return hf_name in self._shapes

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._shapes[hf_name]

    def nbytes(self, hf_name: str) -> int:
        return 2 * math.prod(self._shapes[hf_name])

    def tensor(self, hf_name: str) -> torch.Tensor:
        shape = self._shapes[hf_name]
        count = math.prod(shape)
        return self._values.repeat(-(-count // len(self._values)))[:count].view(shape)

    def close(self) -> None:
        pass


def steps(source: ShapedSource, weights: str, compiled: bool, threads: int) -> dict[int, Timed]:
    """Milliseconds of all layers, by the number of rows."""
    config = source.config
    source.config = config if compiled else replace(config, decoder=None)
    span = load_span(source, LayerSpan(0, config.num_layers), DTYPES[weights])
    source.config = config
    cache = span.new_cache(CONTEXT + max(ROWS))
    cache.open(b"s", CONTEXT + max(ROWS))
    span.forward(span.embed(list(range(CONTEXT))), cache.schedule([StepRequest(b"s", 0, CONTEXT)]), cache)

    def step(rows: int) -> Timed:
        hidden = span.embed(list(range(rows)))
        parents = [-1, *((slot - 1) // 2 for slot in range(1, rows))]
        request = StepRequest(b"s", CONTEXT, 0, parents, range(rows)) if rows > 1 else StepRequest(b"s", CONTEXT)

        def run() -> float:
            torch.set_num_threads(1 if compiled else threads)  # as nodes do
            metadata = cache.schedule([request])
            ms = wall(lambda: span.forward(hidden, metadata, cache))()
            cache.rollback(b"s", CONTEXT)
            return ms

        return run

    return {rows: step(rows) for rows in ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each cell is measured")
    parser.add_argument("--only", choices=MODELS, action="append", help="this model; repeatable")
    parser.add_argument("--use", default="best", help="avx512bf16, avx512vnni, avx512, avx2 or generic")
    args = parser.parse_args()
    dispatch.select_isa(args.use)
    dispatch.set_threads(args.threads)
    lines = []
    with torch.inference_mode():
        for name in args.only or MODELS:
            source = ShapedSource(name, MODELS[name])
            for weights in FORMATS:
                ours = steps(source, weights, compiled=True, threads=args.threads)
                theirs = steps(source, weights, compiled=False, threads=args.threads)
                for rows in ROWS:
                    pairs = measure(args.seconds, {"ours": ours[rows], "theirs": theirs[rows]})
                    ratio = pairs.ratio("ours", "theirs")
                    medians = f"{pairs.median('ours'):.2f} | {pairs.median('theirs'):.2f}"
                    lines.append(f"{name} | {weights} | {rows} | {medians} | {ratio:.2f}")
                del ours, theirs
    print(f"{dispatch.describe()}, {args.threads} threads, ms for all layers\n")
    print(table("shape | weights | rows | compiled | transformers' layers | compiled / transformers'", lines))


if __name__ == "__main__":
    main()
