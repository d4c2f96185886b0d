"""4-bit linear layers: weight quantization, and the layer in plain torch.

Groups of 32 inputs of an output share an fp16 scale and minimum (asymmetric quantization), as in GGUF's Q4_1, whose
weights are imported unchanged. Activations are quantized to int8 as in `int8_linear`; integer sums are exact and the
float operations are rounded one by one in ascending order of k, so results are batch-invariant and bit for bit the same
on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.int8_linear import ACTIVATION_GROUP_SIZE, quantize_rows
from swarm_kernels.ops.base.matrix import CHUNK_WEIGHTS, Matrix

GROUP_SIZE = 32
"""Inputs of an output that share a scale and a minimum."""

_MAX_NUMBER = 15
_FP16_MAX = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class FourBitWeights:
    """Weight `[n, k]` is `numbers[n, k] * scale[n, k // GROUP_SIZE] + minimum[n, k // GROUP_SIZE]`.

    K is padded to whole groups.
    """

    numbers: torch.Tensor  # [N, groups * GROUP_SIZE] uint8, 0 to 15
    scale: torch.Tensor  # [N, groups] fp16
    minimum: torch.Tensor  # [N, groups] fp16

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    @property
    def padded_inputs(self) -> int:
        """K, in whole groups."""
        return self.numbers.shape[1]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def to(self, device: torch.device) -> FourBitWeights:
        return FourBitWeights(self.numbers.to(device), self.scale.to(device), self.minimum.to(device))

    def rows(self, index: torch.Tensor | slice) -> FourBitWeights:
        """Of these outputs."""
        return FourBitWeights(self.numbers[index], self.scale[index], self.minimum[index])

    @staticmethod
    def stacked(parts: Sequence[FourBitWeights]) -> FourBitWeights:
        """The outputs of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        return FourBitWeights(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat([part.minimum for part in parts]),
        )

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """`[m]` ids of outputs -> their weights in fp32, `[m, groups * GROUP_SIZE]`."""
        scale, minimum = self.scale[ids].float(), self.minimum[ids].float()
        groups = self.numbers[ids].view(*scale.shape, GROUP_SIZE).float()
        return (groups * scale[..., None] + minimum[..., None]).flatten(1)


def four_bit_weights(numbers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> FourBitWeights | None:
    """`numbers [N, K]` with K in whole groups; `scale` and `minimum`, `N * K / GROUP_SIZE` floats each, are rounded to
    fp16. None if that does not hold them."""
    outputs = len(numbers)
    scales, minima = scale.half().reshape(outputs, -1), minimum.half().reshape(outputs, -1)
    if not (scales.isfinite().all() and minima.isfinite().all()):
        return None
    return FourBitWeights(numbers.contiguous(), scales.contiguous(), minima.contiguous())


def quantize_weight(weight: Matrix) -> FourBitWeights:
    """`[N, K]` of any float dtype -> 4 bits. Raises KernelError for weights outside the fp16 range."""
    outputs, inputs = weight.shape
    padded = inputs + -inputs % GROUP_SIZE
    numbers = torch.empty(outputs, padded, dtype=torch.uint8, device=weight.device)
    scale, minimum = torch.empty(2, outputs, padded // GROUP_SIZE, dtype=torch.float16, device=weight.device).unbind()
    step = max(1, CHUNK_WEIGHTS // max(1, padded))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        numbers[rows], scale[rows], minimum[rows] = _quantize(weight[rows].float())
    if not (scale.isfinite().all() and minimum.isfinite().all()):
        raise KernelError(f"weights that are not finite or exceed {_FP16_MAX:.0f} cannot be quantized to 4 bits")
    return FourBitWeights(numbers, scale, minimum)


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some fp32 rows -> numbers, scale, minimum. They are padded with their last weight; padding inputs are zero."""
    padding = -weight.shape[1] % GROUP_SIZE
    if padding:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, padding)), 1)
    groups = weight.view(weight.shape[0], -1, GROUP_SIZE)
    low, high = torch.aminmax(groups, dim=2)
    scale, minimum = ((high - low) / _MAX_NUMBER).half(), low.half()
    wide = scale.float()
    inverse = torch.where(wide == 0, 0.0, 1.0 / wide)
    numbers = groups.sub(minimum.float()[..., None]).mul_(inverse[..., None]).round_().clamp_(0, _MAX_NUMBER)
    return numbers.to(torch.uint8).flatten(1), scale, minimum


@dataclass(frozen=True, slots=True, eq=False)
class Int4Linear:
    """See `layer_weights.Linear`; any device. The compiled kernels give bit-identical results."""

    weights: FourBitWeights
    bias: torch.Tensor | None  # [N] fp32
    in_features: int

    @property
    def out_features(self) -> int:
        return self.weights.out_features

    @property
    def nbytes(self) -> int:
        tensors = (self.weights.numbers, self.weights.scale, self.weights.minimum, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        groups, row_scales = quantize_rows(x)
        quantized = groups.flatten(1)
        scale, minimum = self.weights.scale.float(), self.weights.minimum.float()
        total = torch.zeros(x.shape[0], self.out_features, device=x.device)
        for group, numbers in enumerate(torch.split(self.weights.numbers, GROUP_SIZE, 1)):
            part = quantized[:, group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
            sums = (part @ numbers.float().T) * scale[:, group] + part.sum(1, keepdim=True) * minimum[:, group]
            total += sums * row_scales[:, group * GROUP_SIZE // ACTIVATION_GROUP_SIZE, None]
        return (total if self.bias is None else total + self.bias).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights.embedding_rows(ids)[:, : self.in_features]


def quantize_linear(weight: Matrix, bias: torch.Tensor | None = None) -> Int4Linear:
    """Prepare `[N, K]` weights of any float dtype. Raises KernelError for weights outside the fp16 range."""
    return Int4Linear(quantize_weight(weight), None if bias is None else bias.float(), weight.shape[1])
