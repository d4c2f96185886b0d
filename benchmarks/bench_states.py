"""Layers with a recurrent state: all rows in one call on the compiled ops, beside transformers' modules by levels.

    PYTHONPATH=tests/kernels python benchmarks/bench_states.py

One layer of a shape with random weights. Figures are milliseconds of the mixer alone (projections, convolution,
recurrence, norm): one row after another, a tree of 16 in five levels, a prompt of 512 from the first token on. Bursts
of both take turns, so a busy machine slows both alike. What comes out of both is compared first.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from kernel_timing import Timed, measure
from tiny_models import ModelTensors
from transformers import AutoConfig
from zoo.weights import random_model

from swarm.types import LayerSpan
from swarm_kernels.device.device import physical_cores
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.hf_states import StateMixer
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.mixers.one_call import OneCallMixer

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next-80B-A3B": ("qwen3_next", {
        "hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mlp_only_layers": [0],
        "layer_types": ["linear_attention"], "num_experts": 1, "num_experts_per_tok": 1,
    }),
    "LFM2-1.2B": ("lfm2", {"hidden_size": 2048, "layer_types": ["conv"]}),
    "Granite 4.0 H Small": ("granitemoehybrid", {
        "hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "mamba_expand": 2, "layer_types": ["mamba"], "num_local_experts": 1, "num_experts_per_tok": 1,
        "shared_intermediate_size": 64,
    }),
}  # fmt: skip
CONTEXT, TREE, PROMPT, LONGEST = 256, 16, 512, 2048
TOLERANCE = {torch.bfloat16: 3e-2, torch.int8: 1e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: all")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each cell is measured")
    parser.add_argument("--use", default="best", help="avx512bf16, avx512vnni, avx512, avx2 or generic")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    dispatch.select_isa(args.use)
    dispatch.set_threads(args.threads)
    print(f"{dispatch.describe()}, {args.threads} threads\n")
    print("| layer | weights | rows | before, ms | now, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for shape in [args.shape] if args.shape else SHAPES:
        for dtype in TOLERANCE:
            layer = _Layer(_load(shape, dtype))
            for rows in (1, TREE, PROMPT):
                print(f"| {shape} | {str(dtype)[6:]} | {rows} | {layer.cells(rows, args.seconds)} |", flush=True)


def _load(shape: str, dtype: torch.dtype) -> HfSpan:
    kind, sizes = SHAPES[shape]
    config = AutoConfig.for_model(
        kind, **{"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "max_position_embeddings": 4096, **sizes},
    )  # fmt: skip
    span = load_span(ModelTensors(random_model(config)), LayerSpan(0, 1), dtype)
    assert isinstance(span, HfSpan)
    return span


class _Layer:
    """The only layer of a span, run in both ways."""

    def __init__(self, span: HfSpan) -> None:
        module: Any = span.attention_module(0)
        assert isinstance(module.forward, StateMixer)
        self.mixer = module.forward
        assert self.mixer.one_call is not None
        self.ways: dict[str, OneCallMixer | None] = {"before": None, "now": self.mixer.one_call}
        self.span, self.ms, self._started = span, 0.0, 0.0
        self.cache = span.cache_for(4096, 1)
        self.cache.open(b"a", LONGEST)
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randn(CONTEXT + PROMPT, span.config.hidden_size, generator=generator).to(span.dtype)
        module.register_forward_pre_hook(lambda *_: setattr(self, "_started", time.perf_counter()))
        module.register_forward_hook(lambda *_: setattr(self, "ms", (time.perf_counter() - self._started) * 1e3))

    def cells(self, rows: int, seconds: float) -> str:
        outputs = []
        for name in self.ways:
            self.cache.rollback(b"a", 0)
            outputs.append(self.step(name, rows).float())
        before, now = outputs
        distance = float((before - now).norm() / before.norm())
        if not distance <= TOLERANCE[self.span.weight_dtype]:
            raise SystemExit(f"both ways differ by {distance:.2g}")
        self.cache.rollback(b"a", 0)
        pairs = measure(seconds, {name: self._timed(name, rows) for name in self.ways})
        ratio = pairs.ratio("before", "now")
        return f"{pairs.median('before'):.2f} | {pairs.median('now'):.2f} | {ratio:.2f}"

    def step(self, way: str, rows: int) -> torch.Tensor:
        """On the state after `CONTEXT` tokens, or a prompt from the first one on."""
        self.mixer.one_call = self.ways[way]
        done = self.cache.length(b"a")
        if rows == PROMPT or done == LONGEST:
            self.cache.rollback(b"a", 0)
            done = 0
        if rows != PROMPT and done == 0:
            self._run(self.words[:CONTEXT], StepRequest(b"a", 0, CONTEXT))
            done = CONTEXT
        hidden = self.words[:rows] if rows == PROMPT else self.words[CONTEXT : CONTEXT + rows]
        if rows != TREE:
            return self._run(hidden, StepRequest(b"a", done, rows))
        parents = tuple((row - 1) // 2 if row else -1 for row in range(rows))
        out = self._run(hidden, StepRequest(b"a", done, 0, parents, tuple(range(rows))))
        self.cache.drop_tree(b"a")
        return out

    def _run(self, hidden: torch.Tensor, request: StepRequest) -> torch.Tensor:
        return self.span.forward(hidden, self.cache.schedule([request]), self.cache)

    def _timed(self, way: str, rows: int) -> Timed:
        def run() -> float:
            self.step(way, rows)
            return self.ms

        return run


if __name__ == "__main__":
    with torch.inference_mode():
        main()
