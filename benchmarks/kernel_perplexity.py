"""Perplexity of SmolLM2-135M on perplexity.txt, in each number format: the quality lost to quantization."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from kernel_timing import table

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.load import load_span
from swarm_kernels.tokenizer.tokenizer import load_tokenizer

TEXT = Path(__file__).with_name("perplexity.txt")
FORMATS = ("fp32", "bf16", "int8", "int4")


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
    rows = [f"{name} | {value:.3f} | {100 * (value / found['fp32'] - 1):+.2f}%" for name, value in found.items()]
    return table(f"weights, {len(tokens)} tokens | perplexity | against fp32", rows)
