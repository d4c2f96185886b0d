"""Weights as a checkpoint holds them, which the kernels take without another rounding. Owns which formats these are."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_kernels.ops.base.codebook_linear import CodedWeights
from swarm_kernels.ops.base.fp8_linear import Fp8Weights
from swarm_kernels.ops.base.int4_linear import FourBitWeights

StoredWeights = FourBitWeights | CodedWeights | Fp8Weights
"""`[out_features, padded_inputs]`."""


def stacked(parts: Sequence[StoredWeights]) -> StoredWeights | None:
    """The outputs of all parts, one after another; None if they are not of one format."""
    codes = [part for part in parts if isinstance(part, CodedWeights)]
    if len(codes) == len(parts):
        return CodedWeights.stacked(codes)
    fp8 = [part for part in parts if isinstance(part, Fp8Weights)]
    if len(fp8) == len(parts):
        return Fp8Weights.stacked(fp8)
    steps = [part for part in parts if isinstance(part, FourBitWeights)]
    return FourBitWeights.stacked(steps) if len(steps) == len(parts) else None
