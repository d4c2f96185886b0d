"""Perplexity of SmolLM2-135M on perplexity.txt, in each number format: the quality lost to quantization."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from kernel_timing import table

from swarm.types import LayerSpan
from swarm_kernels.device.device import CODES4, DTYPES, INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.layers import layer_of
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops.base.codebook_linear import CodedWeights, quantize_mxfp4
from swarm_kernels.runtime.load import load_span
from swarm_kernels.tokenizer.tokenizer import load_tokenizer

TEXT = Path(__file__).with_name("perplexity.txt")
FORMATS = ("fp32", "bf16", "int8", "int4")


class RoundedToMxfp4:
    """A ModelSource whose layers hold another one's matrices in MXFP4."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def native(self, hf_name: str) -> torch.dtype:
        in_layers = layer_of(hf_name, self._source.config.num_layers) is not None
        return CODES4 if in_layers else self._source.native(hf_name)

    def as_stored(self, hf_name: str, expert: int | None = None) -> CodedWeights:
        return quantize_mxfp4(self._source.tensor(hf_name))


class Dequantized(RoundedToMxfp4):
    """The same in floats."""

    def sliced(self, hf_name: str) -> torch.Tensor:
        stored = self._source.tensor(hf_name)
        if stored.dim() != 2 or super().native(hf_name) != CODES4:
            return stored
        return quantize_mxfp4(stored).embedding_rows(torch.arange(len(stored)))


def perplexity(source: ModelSource, tokens: list[int], weights: torch.dtype) -> float:
    """exp of the mean negative log-likelihood of each token after those before it."""
    span = load_span(source, LayerSpan(0, source.config.num_layers), weights)
    cache = span.new_cache(len(tokens))
    cache.open(b"text", len(tokens))
    hidden = span.forward(span.embed(tokens), cache.schedule([StepRequest(b"text", 0, len(tokens))]), cache)
    logits = span.logits(hidden[:-1])
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item())


def bench(source: ModelSource) -> str:
    tokens = list(load_tokenizer(source).encode(TEXT.read_text(encoding="utf-8")))
    found = {name: perplexity(source, tokens, DTYPES[name]) for name in FORMATS}
    found["mxfp4"] = perplexity(RoundedToMxfp4(source), tokens, INT4)
    found["mxfp4, float activations"] = perplexity(Dequantized(source), tokens, torch.float32)
    rows = [f"{name} | {value:.3f} | {100 * (value / found['fp32'] - 1):+.2f}%" for name, value in found.items()]
    return table(f"weights, {len(tokens)} tokens | perplexity | against fp32", rows)
