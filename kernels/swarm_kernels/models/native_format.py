"""The number format that a checkpoint is best served in (`--dtype auto`), and that of each of its matrices. Pure."""

from __future__ import annotations

import math
from collections import Counter

import torch

from swarm_kernels.device.device import INT4
from swarm_kernels.models.layers import layer_of
from swarm_kernels.models.source import ModelSource

_EXPERTS_OF_THEIR_OWN = frozenset({"llama4", "llama4_text", "jetmoe", "dbrx", "longcat_flash"})
"""Types whose experts are neither linear layers nor go through transformers' experts interface."""


def native_dtype(source: ModelSource) -> torch.dtype:
    """The smallest of bf16, int8 and int4 in which most weights of the model lose next to nothing.

    bf16 for models that are refused in fewer bits.
    """
    if source.config.model_type in _EXPERTS_OF_THEIR_OWN:
        return torch.bfloat16
    counts: Counter[torch.dtype] = Counter()
    for name in source.names():
        shape = source.shape(name)
        if len(shape) >= 2 and layer_of(name, source.config.num_layers) is not None:  # experts may be stacked
            counts[source.native(name)] += math.prod(shape)
    half = counts.total() / 2
    if counts[INT4] > half:
        return INT4
    return torch.int8 if counts[INT4] + counts[torch.int8] > half else torch.bfloat16


def matrix_dtype(source: ModelSource, name: str, span: torch.dtype) -> torch.dtype:
    """What a matrix of the layers becomes in a span of this format: 4 bits do not hold what is stored in 5 to 8."""
    return torch.int8 if span == INT4 and source.native(name) == torch.int8 else span
