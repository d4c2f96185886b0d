"""8-bit linear layers: weight and activation quantization, and the layer in plain torch.

Weights are int8 with one scale per output channel. Activations are quantized dynamically to int8 in groups of 64
inputs, each with its own scale, so an outlier costs only its group precision. Integer products of a group are exact and
groups are added in ascending order in fp32, so results are batch-invariant and bit for bit the same on every backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import KernelError
from swarm_kernels.ops.base.matrix import CHUNK_WEIGHTS, Matrix

ACTIVATION_GROUP_SIZE = 64
"""Inputs of a row that share a scale."""

MAX_INPUTS = 1 << 17
"""The int32 sum of products of a longer row could overflow."""

_LARGEST = 127.0
_TINY = 1e-30  # a group with a smaller maximum is quantized to zeros


def quantize_weight(weight: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, K]` of any float dtype -> int8 `[N, K]` and fp32 scales `[N]`."""
    outputs, inputs = weight.shape
    check_inputs(inputs)
    numbers = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scale = torch.empty(outputs, dtype=torch.float32, device=weight.device)
    step = max(1, CHUNK_WEIGHTS // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        wide = weight[rows].float()
        scale[rows] = wide.abs().amax(1) / _LARGEST
        scaled = wide.div(scale[rows].clamp_min(_TINY)[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
        numbers[rows] = scaled.to(torch.int8)
    return numbers, scale


def check_inputs(inputs: int) -> None:
    """Raises KernelError."""
    if inputs > MAX_INPUTS:
        raise KernelError(f"a linear layer of {inputs} inputs cannot be quantized to 8 bits: {MAX_INPUTS} at most")


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, K]` -> int8 values as fp32 `[n, groups, ACTIVATION_GROUP_SIZE]`, zero-padded, and scales `[n, groups]`."""
    groups = F.pad(x.float(), (0, -x.shape[1] % ACTIVATION_GROUP_SIZE)).view(x.shape[0], -1, ACTIVATION_GROUP_SIZE)
    peak = groups.abs().amax(2)
    tiny = peak <= _TINY
    inverse = torch.where(tiny, 0.0, torch.full_like(peak, _LARGEST) / peak)  # a number / tensor is rounded twice
    return (groups * inverse[..., None]).round(), torch.where(tiny, 0.0, peak / _LARGEST)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Linear:
    """See `layer_weights.Linear`; any device. The compiled kernels give bit-identical results."""

    numbers: torch.Tensor  # [N, K] int8
    scale: torch.Tensor  # [N] fp32
    bias: torch.Tensor | None  # [N] fp32

    @property
    def in_features(self) -> int:
        return self.numbers.shape[1]

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        numbers, row_scales = quantize_rows(x)
        total = torch.zeros(x.shape[0], self.out_features, device=x.device)
        for group, weights in enumerate(torch.split(self.numbers, ACTIVATION_GROUP_SIZE, 1)):
            sums = numbers[:, group, : weights.shape[1]] @ weights.float().T  # below 2^24: exact in fp32 in any order
            total += row_scales[:, group, None] * sums
        total = total * self.scale
        return (total if self.bias is None else total + self.bias).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.numbers.index_select(0, ids).float() * self.scale.index_select(0, ids)[:, None]


def quantize_linear(weight: Matrix, bias: torch.Tensor | None = None) -> Int8Linear:
    """Prepare `[N, K]` weights of any float dtype. Raises KernelError for more inputs than `MAX_INPUTS`."""
    return Int8Linear(*quantize_weight(weight), None if bias is None else bias.float())
