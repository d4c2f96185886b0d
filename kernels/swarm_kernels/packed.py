"""Linear layers with their weights packed for the compiled CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import KernelError
from swarm_kernels import native
from swarm_kernels.cpu import binding

BLOCK = 16
"""Outputs packed side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights in blocks of 16 outputs, the last padded: fp32 `[N/16, K, 16]`, bf16 `[N/16, K/2, 16, 2]`.

    Products and sums are fp32, in rising order of k in one chain, so a row's result is the same bit for bit alone and
    among others, on any number of threads.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None  # [N rounded up to 16] fp32
    in_features: int
    out_features: int
    desc: binding.Linear

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.device.type != "cpu":
            raise KernelError(f"a linear layer of {self.in_features} inputs was given {tuple(x.shape)} on {x.device}")
        wide = x.to(torch.float32).contiguous()
        out = torch.empty(x.shape[0], self.out_features)
        status = native.loaded().swarm_linear(self.desc, wide.data_ptr(), wide.shape[0], out.data_ptr())
        native.check(status)
        return out.to(x.dtype)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """See `ops.pack_linear`; `weight` on the CPU, bf16 or fp32."""
    outputs, inputs = weight.shape
    blocks = -(-outputs // BLOCK)
    if inputs % 2:  # bf16 weights are read in pairs of inputs
        weight = weight.float()
    padded = F.pad(weight, (0, 0, 0, blocks * BLOCK - outputs)) if outputs % BLOCK else weight
    if weight.dtype == torch.bfloat16:
        source = padded.view(blocks, BLOCK, inputs // 2, 2).permute(0, 2, 1, 3)
    else:
        source = padded.view(blocks, BLOCK, inputs).permute(0, 2, 1)
    packed = torch.empty(source.shape, dtype=weight.dtype)
    native.loaded().swarm_advise_huge(packed.data_ptr(), packed.nbytes)
    packed.copy_(source)
    if bias is not None:
        bias = F.pad(bias.float(), (0, blocks * BLOCK - outputs)).contiguous()
    where = None if bias is None else bias.data_ptr()
    desc = binding.Linear(packed.data_ptr(), where, inputs, outputs, weight.dtype == torch.bfloat16)
    return PackedLinear(packed, bias, inputs, outputs, desc)
