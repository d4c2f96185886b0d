"""Perplexity of SmolLM2-135M on perplexity.txt, in each number format: the quality lost to quantization."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_timing import table
from rounded_weights import to_fp8, to_nf4

from swarm.types import LayerSpan
from swarm_kernels.device.device import CODES4, DTYPES, FLOAT8, INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.layers import layer_of
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops.base.codebook_linear import quantize_mxfp4
from swarm_kernels.ops.base.stored_weights import StoredWeights
from swarm_kernels.runtime.load import load_span
from swarm_kernels.tokenizer.tokenizer import load_tokenizer

TEXT = Path(__file__).with_name("perplexity.txt")
FORMATS = ("fp32", "bf16", "int8", "int4")
CODES: dict[str, tuple[torch.dtype, torch.dtype, Callable[[torch.Tensor], StoredWeights]]] = {
    "mxfp4": (INT4, CODES4, quantize_mxfp4),
    "nf4": (INT4, CODES4, to_nf4),
    "fp8": (torch.int8, FLOAT8, to_fp8),
}
"""The span's format, that of its matrices, and how they are rounded."""


class Rounded:
    """A ModelSource whose layers hold another one's matrices in codes."""

    def __init__(self, source: ModelSource, native: torch.dtype, rounded: Callable[[torch.Tensor], StoredWeights]):
        self._source, self._native, self._rounded = source, native, rounded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def native(self, hf_name: str) -> torch.dtype:
        return self._native if self._is_rounded(hf_name) else self._source.native(hf_name)

    def as_stored(self, hf_name: str, expert: int | None = None) -> StoredWeights:
        return self._rounded(self._source.tensor(hf_name).float())

    def _is_rounded(self, hf_name: str) -> bool:
        in_layers = layer_of(hf_name, self._source.config.num_layers) is not None
        return in_layers and len(self._source.shape(hf_name)) == 2


class Dequantized(Rounded):
    """The same in floats."""

    def native(self, hf_name: str) -> torch.dtype:
        return torch.bfloat16

    def sliced(self, hf_name: str) -> torch.Tensor:
        stored = self._source.tensor(hf_name)
        if not self._is_rounded(hf_name):
            return stored
        return self._rounded(stored.float()).embedding_rows(torch.arange(len(stored)))


def perplexity(source: Any, tokens: list[int], weights: torch.dtype) -> float:
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
    for name, (span, native, rounded) in CODES.items():
        found[name] = perplexity(Rounded(source, native, rounded), tokens, span)
        exact = perplexity(Dequantized(source, native, rounded), tokens, torch.float32)
        found[f"{name}, float activations"] = exact
    rows = [f"{name} | {value:.3f} | {100 * (value / found['fp32'] - 1):+.2f}%" for name, value in found.items()]
    return table(f"weights, {len(tokens)} tokens | perplexity | against fp32", rows)
