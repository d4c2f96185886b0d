"""DeepSeek's latent attention on a latent cache beside transformers' expanded keys and values, in one run:

    PYTHONPATH=tests/kernels python benchmarks/bench_latent.py

One layer of a shape with random weights, loaded twice: as it is served, and with expansion left in place. Figures are
milliseconds of the attention module alone (projections, cache, attention), and of the whole layer; bursts of both take
turns, so a busy machine slows both alike. What comes out of both is compared first.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import torch
from kernel_timing import Pairs, Timed, measure
from tiny_models import ModelTensors
from transformers import AutoConfig
from zoo.weights import random_model

from swarm.types import LayerSpan
from swarm_kernels.device.device import physical_cores
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime import hf_span
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": ("deepseek_v2", {"hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": None}),
    "DeepSeek-V3": ("deepseek_v3", {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536}),
}
STEPS = ((1024, 1), (4096, 1), (1024, 16), (4096, 16), (0, 512), (4096, 512))  # context, rows
LARGEST = 4096 + 512
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="DeepSeek-V2-Lite")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each cell is measured")
    parser.add_argument("--use", default="best", help="avx512bf16, avx512vnni, avx512, avx2, generic or reference")
    args = parser.parse_args()
    dispatch.select_isa(args.use)
    dispatch.set_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    latent, expanded = _spans(args.shape, dtype)
    print(f"{args.shape}, {args.dtype}, {dispatch.describe()}, {args.threads} threads\n")
    sizes = {name: span.kv_bytes_per_token_per_layer for name, span in (("latent", latent), ("expanded", expanded))}
    numbers = {name: size // dtype.itemsize for name, size in sizes.items()}
    print(f"a token takes {numbers['latent']} numbers in the latent cache, {numbers['expanded']} in the expanded one")
    print(f"({numbers['expanded'] / numbers['latent']:.0f} times as many)\n")
    print("| rows | context | attention: latent | expanded | ratio | layer: latent | expanded | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for context, rows in STEPS:
            print(_line(_Bench(latent, context, rows), _Bench(expanded, context, rows), args.seconds), flush=True)


def _spans(shape: str, dtype: torch.dtype) -> tuple[HfSpan, HfSpan]:
    kind, sizes = SHAPES[shape]
    heads = sizes["num_attention_heads"]
    config = AutoConfig.for_model(
        kind, **LATENT, **sizes, num_key_value_heads=heads, num_hidden_layers=1, first_k_dense_replace=1,
        intermediate_size=2048, vocab_size=64, max_position_embeddings=8192,
    )  # fmt: skip
    source = ModelTensors(random_model(config))
    latent = load_span(source, LayerSpan(0, 1), dtype)
    with mock.patch.object(hf_span, "absorb", return_value=[]):
        expanded = load_span(source, LayerSpan(0, 1), dtype)
    assert isinstance(latent, HfSpan)
    assert isinstance(expanded, HfSpan)
    return latent, expanded


class _Bench:
    """Steps of `rows` rows on `context` tokens of one session: up to 16 are a tree of single rows, more a prompt."""

    def __init__(self, span: HfSpan, context: int, rows: int) -> None:
        self.span, self.context, self.rows = span, context, rows
        self.cache: KVCacheManager = span.new_cache(LARGEST + 64)
        self.cache.open(b"a", LARGEST)
        generator = torch.Generator().manual_seed(1)
        words = torch.randn(context + rows, span.config.hidden_size, generator=generator).to(span.dtype)
        self.hidden = words[context:]
        for done in range(0, context, 512):
            self._run(words[done : done + 512], StepRequest(b"a", done, min(512, context - done)))
        self.attention_ms = 0.0
        self._started = 0.0
        module = span.attention_module(0)
        module.register_forward_pre_hook(lambda *_: setattr(self, "_started", time.perf_counter()))
        module.register_forward_hook(lambda *_: self._stop())

    def _stop(self) -> None:
        self.attention_ms = (time.perf_counter() - self._started) * 1e3

    def _run(self, hidden: torch.Tensor, request: StepRequest) -> torch.Tensor:
        return self.span.forward(hidden, self.cache.schedule([request]), self.cache)

    def step(self) -> torch.Tensor:
        if self.rows > 16:
            out = self._run(self.hidden, StepRequest(b"a", self.context, self.rows))
            self.cache.rollback(b"a", self.context)
            return out
        parents = tuple((row - 1) // 2 if row else -1 for row in range(self.rows))
        out = self._run(self.hidden, StepRequest(b"a", self.context, 0, parents, tuple(range(self.rows))))
        self.cache.drop_tree(b"a")
        return out

    def timed(self, *, attention: bool) -> Timed:
        def run() -> float:
            start = time.perf_counter()
            self.step()
            whole = (time.perf_counter() - start) * 1e3
            return self.attention_ms if attention else whole

        return run


def _line(latent: _Bench, expanded: _Bench, seconds: float) -> str:
    ours, theirs = latent.step().float(), expanded.step().float()
    distance = float((ours - theirs).norm() / theirs.norm())
    if not distance <= TOLERANCE[latent.span.dtype]:
        raise SystemExit(f"latent and expanded differ by {distance:.2g}")
    cells = []
    for attention in (True, False):
        times: Pairs = measure(
            seconds, {"latent": latent.timed(attention=attention), "expanded": expanded.timed(attention=attention)}
        )
        cells += [f"{times.median(name):.2f}" for name in ("latent", "expanded")]
        cells.append(f"{times.ratio('latent', 'expanded'):.2f}")
    return f"| {latent.rows} | {latent.context} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
