"""Linear layers with their weights packed for the compiled CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import KernelError
from swarm_kernels import native
from swarm_kernels.cpu import binding
from swarm_kernels.quantised import quantise_weight

BLOCK = 16
"""Outputs packed side by side."""

_TOGETHER = {binding.FP32: 1, binding.BF16: 2, binding.INT8: 4}
"""Inputs of one output that lie side by side."""

_OFFSET = 128
"""Added to 8-bit weights: the dot-product instructions take them unsigned."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights in blocks of 16 outputs, the last padded: fp32 `[N/16, K, 16, 1]`, bf16 `[N/16, K/2, 16, 2]`, int8
    `[N/16, K/4, 16, 4]`.

    Products and sums are fp32, in rising order of k in one chain, or exact for int8 (see `quantised`), so a row's
    result is the same bit for bit alone and among others, on any number of threads.
    """

    packed: torch.Tensor
    scale: torch.Tensor | None  # int8: [N rounded up to 16] fp32
    bias: torch.Tensor | None  # [N rounded up to 16] fp32
    in_features: int
    out_features: int
    desc: binding.Linear

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.packed, self.scale, self.bias) if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.device.type != "cpu":
            raise KernelError(f"a linear layer of {self.in_features} inputs was given {tuple(x.shape)} on {x.device}")
        wide = x.to(torch.float32).contiguous()
        out = torch.empty(x.shape[0], self.out_features)
        if x.shape[0]:
            native.check(native.loaded().swarm_linear(self.desc, wide.data_ptr(), wide.shape[0], out.data_ptr()))
        return out.to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        weights = self.packed[ids // BLOCK, :, ids % BLOCK].flatten(1)[:, : self.in_features]
        if self.scale is None:
            return weights
        return (weights.float() - _OFFSET) * self.scale[ids, None]


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """See `ops.pack_linear`; `weight` on the CPU, bf16 or fp32."""
    if weight.shape[1] % 2:  # bf16 weights are read in pairs of inputs
        weight = weight.float()
    return _pack(weight, None, bias, binding.BF16 if weight.dtype == torch.bfloat16 else binding.FP32)


def quantise_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """See `ops.quantise_linear`; `weight` on the CPU."""
    numbers, scale = quantise_weight(weight)
    raised = (numbers.view(torch.uint8) ^ _OFFSET).contiguous()  # of an int8: plus 128
    return _pack(raised, scale, bias, binding.INT8)


def _pack(weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, form: int) -> PackedLinear:
    """`weight [N, K]`, `scale` and `bias` `[N]`. What pads int8 weights is multiplied by padding."""
    outputs, inputs = weight.shape
    together = _TOGETHER[form]
    padded = F.pad(weight, (0, -inputs % together, 0, -outputs % BLOCK))
    source = padded.view(-1, BLOCK, padded.shape[1] // together, together).permute(0, 2, 1, 3)
    packed = torch.empty(source.shape, dtype=weight.dtype)
    native.loaded().swarm_advise_huge(packed.data_ptr(), packed.nbytes)
    packed.copy_(source)
    scale, bias = (None if x is None else F.pad(x.float(), (0, -outputs % BLOCK)).contiguous() for x in (scale, bias))
    pointers = (None if x is None else x.data_ptr() for x in (packed, scale, bias))
    return PackedLinear(packed, scale, bias, inputs, outputs, binding.Linear(*pointers, inputs, outputs, form))
