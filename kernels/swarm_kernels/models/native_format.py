"""The number format that a checkpoint is best served in (`--dtype auto`), and that of each of its matrices. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from swarm_kernels.device.device import CODES4, FLOAT8, INT4
from swarm_kernels.models.layers import layer_of
from swarm_kernels.models.source import ModelSource

_EXPERTS_OF_THEIR_OWN = frozenset({"jetmoe", "dbrx", "longcat_flash"})
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
    half, four_bits = counts.total() / 2, counts[INT4] + counts[CODES4]
    if four_bits > half:
        return INT4
    return torch.int8 if four_bits + counts[torch.int8] + counts[FLOAT8] > half else torch.bfloat16


@dataclass(frozen=True, slots=True)
class MatrixFormats:
    """What the matrices of the layers become in a span of one format. Use `of`."""

    source: ModelSource
    span: torch.dtype
    keeps_wide: bool

    @classmethod
    def of(cls, source: ModelSource, span: torch.dtype) -> MatrixFormats:
        return cls(source, span, span == INT4 and native_dtype(source) == INT4)

    def __getitem__(self, name: str) -> torch.dtype:
        """4 bits do not hold what is stored in 5 to 8; and what a checkpoint of 4 bits keeps in 16, like the attention
        of gpt-oss, stays so. CODES4, and FLOAT8 in spans of 8 bits too: as it is stored, or in 8 bits where that
        cannot be."""
        if self.span not in (INT4, torch.int8):
            return self.span
        native = self.source.native(name)
        if self.span == torch.int8:
            return FLOAT8 if native == FLOAT8 else self.span
        return INT4 if native == torch.bfloat16 and not self.keeps_wide else native
