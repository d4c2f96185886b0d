"""4-bit linear layers: how weights become numbers of 4 bits, and the layer in plain torch.

32 inputs of an output share a scale and a minimum in fp16, as in GGUF's Q4_1, whose weights are taken over unchanged.
Inputs become int8 as in `quantized`; whole numbers are summed exactly and the rest is rounded operation by operation in
rising order, so a row's result depends neither on its neighbours nor on who computes it, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.int8_linear import ACTIVATION_GROUP_SIZE, quantize_rows
from swarm_kernels.ops.base.layer_weights import Linear, plain_linear

GROUP_SIZE = 32
"""Inputs that share a scale and a minimum."""

_MOST = 15
_FP16_MAX = 65504.0
_CHUNK = 1 << 18  # weights quantized at a time: its temporaries stay in the caches


@dataclass(frozen=True, slots=True, eq=False)
class FourBitWeights:
    """Weight `[n, k]` is `numbers[n, k] * scale[n, k // GROUP_SIZE] + least[n, k // GROUP_SIZE]`; K padded to whole shares."""

    numbers: torch.Tensor  # [N, shares * GROUP_SIZE] uint8, 0 to 15
    scale: torch.Tensor  # [N, shares] fp16
    minimum: torch.Tensor  # [N, shares] fp16

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """`[m]` ids of outputs -> their weights in fp32, `[m, shares * GROUP_SIZE]`."""
        scale, least = self.scale[ids].float(), self.minimum[ids].float()
        shares = self.numbers[ids].view(*scale.shape, GROUP_SIZE).float()
        return (shares * scale[..., None] + least[..., None]).flatten(1)


def quantize_weight(weight: torch.Tensor) -> FourBitWeights:
    """`[N, K]` of any float dtype -> 4 bits. Raises KernelError for what fp16 cannot hold."""
    outputs, inputs = weight.shape
    padded = inputs + -inputs % GROUP_SIZE
    numbers = torch.empty(outputs, padded, dtype=torch.uint8, device=weight.device)
    scale, least = torch.empty(2, outputs, padded // GROUP_SIZE, dtype=torch.float16, device=weight.device).unbind()
    step = max(1, _CHUNK // max(1, padded))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        numbers[rows], scale[rows], least[rows] = _quantize(weight[rows].float())
    if not (scale.isfinite().all() and least.isfinite().all()):
        raise KernelError(f"weights beyond {_FP16_MAX:.0f}, or that are no numbers, cannot be held in 4 bits")
    return FourBitWeights(numbers, scale, least)


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some rows, fp32 -> numbers, scale, minimum. What pads a row repeats its last weight and is multiplied by zero."""
    padding = -weight.shape[1] % GROUP_SIZE
    if padding:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, padding)), 1)
    shares = weight.view(weight.shape[0], -1, GROUP_SIZE)
    low, high = torch.aminmax(shares, dim=2)
    scale, least = ((high - low) / _MOST).half(), low.half()
    wide = scale.float()
    inverse = torch.where(wide == 0, 0.0, 1.0 / wide)
    numbers = shares.sub(least.float()[..., None]).mul_(inverse[..., None]).round_().clamp_(0, _MOST)
    return numbers.to(torch.uint8).flatten(1), scale, least


@dataclass(frozen=True, slots=True, eq=False)
class Int4Linear:
    """See `layer_weights.Linear`; any device. The compiled kernels compute the same bits."""

    weights: FourBitWeights
    bias: torch.Tensor | None  # [N] fp32
    in_features: int

    @property
    def out_features(self) -> int:
        return self.weights.numbers.shape[0]

    @property
    def nbytes(self) -> int:
        held = (self.weights.numbers, self.weights.scale, self.weights.minimum, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        groups, steps = quantize_rows(x)
        integers = groups.flatten(1)
        scale, least = self.weights.scale.float(), self.weights.minimum.float()
        total = torch.zeros(x.shape[0], self.out_features, device=x.device)
        for share, numbers in enumerate(torch.split(self.weights.numbers, GROUP_SIZE, 1)):
            part = integers[:, share * GROUP_SIZE : (share + 1) * GROUP_SIZE]
            sums = (part @ numbers.float().T) * scale[:, share] + part.sum(1, keepdim=True) * least[:, share]
            total += sums * steps[:, share * GROUP_SIZE // ACTIVATION_GROUP_SIZE, None]
        return (total if self.bias is None else total + self.bias).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights.embedding_rows(ids)[:, : self.in_features]


def quantize_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int4Linear:
    """Prepare `[N, K]` weights of any float dtype. Raises KernelError for what fp16 cannot hold."""
    return Int4Linear(quantize_weight(weight), None if bias is None else bias.float(), weight.shape[1])


def rounded_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The layer with its weights rounded to 4 bits and nothing else: what `Int4Linear` approximates."""
    held = quantize_weight(weight).embedding_rows(torch.arange(weight.shape[0], device=weight.device))
    return plain_linear(held[:, : weight.shape[1]], bias)
