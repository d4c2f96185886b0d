"""Linear layers of E4M3 weights with a scale for some inputs of an output, computed from what fp8 checkpoints hold.

Inputs are rounded to bf16, so that products are exact in fp32. The compiled kernels add those of 128 inputs as
`bf16`'s are, multiply the sum by the scale, and add these in ascending order of k, rounding each: their results are
batch-invariant and the same on every instruction set. In plain torch the order of the sums is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm_kernels.ops.base.layer_weights import OfCodes
from swarm_kernels.ops.base.matrix import CHUNK_WEIGHTS

GROUP_SIZE = 128
"""Inputs of an output that share a scale; the last group may be shorter."""

INPUTS = 4
"""A row's are a multiple of these."""

_NO_NUMBER = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weights:
    """Weight `[n, k]` is the number of its code times `scale[n, k // GROUP_SIZE]`."""

    codes: torch.Tensor  # [N, K] uint8, E4M3 (arXiv 2209.05433)
    scale: torch.Tensor  # [N, groups] fp32

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def padded_inputs(self) -> int:
        """As many as there are."""
        return self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def to(self, device: torch.device) -> Fp8Weights:
        return Fp8Weights(self.codes.to(device), self.scale.to(device))

    def rows(self, index: torch.Tensor | slice) -> Fp8Weights:
        """Of these outputs."""
        return Fp8Weights(self.codes[index], self.scale[index])

    def embedding_rows(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """`[m]` ids of outputs -> their weights in fp32, `[m, K]`."""
        numbers = self.codes[ids].view(torch.float8_e4m3fn).float()
        return numbers.mul_(self.scale[ids].repeat_interleave(GROUP_SIZE, 1)[:, : self.padded_inputs])

    @staticmethod
    def stacked(parts: Sequence[Fp8Weights]) -> Fp8Weights:
        """The outputs of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        return Fp8Weights(torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]))


def fp8_weights(codes: torch.Tensor, scale: torch.Tensor) -> Fp8Weights | None:
    """None where a code or a scale is no number."""
    if not scale.isfinite().all() or (codes.view(torch.uint8) & _NO_NUMBER == _NO_NUMBER).any():
        return None
    return Fp8Weights(codes.view(torch.uint8), scale)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear(OfCodes):
    """See `layer_weights.Linear`; any device."""

    weights: Fp8Weights
    bias: torch.Tensor | None  # [N] fp32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rounded, step = x.bfloat16().float(), max(1, CHUNK_WEIGHTS // max(1, self.in_features))
        parts = [
            F.linear(rounded, self.weights.embedding_rows(slice(start, start + step)))
            for start in range(0, self.out_features, step)
        ]
        out = torch.cat(parts, 1)
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights.embedding_rows(ids)
