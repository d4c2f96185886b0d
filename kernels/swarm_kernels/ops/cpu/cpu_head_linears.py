"""A linear layer of its own for each attention head, packed for the compiled CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.cpu import cpu_library, cpu_linear
from swarm_kernels.ops.cpu.code_blocks import BLOCK
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class PackedHeadLinears:
    """See `base.head_linears.HeadLinears`. `linear`: the heads' outputs one after the other. Batch-invariant, like
    `PackedLinear`."""

    heads: int
    linear: PackedLinear

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        rows, width, size = x.shape[0], self.linear.in_features, self.linear.out_features // self.heads
        if x.shape != (rows, self.heads, width) or out.shape != (rows, self.heads, size):
            raise KernelError(f"{self.heads} linear layers of {width} inputs were given {tuple(x.shape)}")
        wide = x.float()
        if wide.stride(2) != 1:
            wide = wide.contiguous()
        direct = out.dtype is torch.float32 and out.stride(2) == 1
        to = out if direct else torch.empty(out.shape)
        strides = wide.stride(1), wide.stride(0), rows
        cpu_library.check(
            cpu_library.loaded().swarm_head_linears(
                self.linear.desc, self.heads, wide.data_ptr(), *strides, to.data_ptr(), to.stride(1), to.stride(0)
            )
        )
        if not direct:
            out.copy_(to)

    def matrix(self) -> torch.Tensor:
        rows = self.linear.embedding_rows(torch.arange(self.linear.out_features))
        return rows.view(self.heads, -1, self.linear.in_features)


def supports(weight: torch.Tensor) -> bool:
    """Whether `weight [H, N, K]` can be packed: N a multiple of 16, K even."""
    plain = weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float32)
    return plain and weight.shape[1] % BLOCK == 0 and weight.shape[2] % 2 == 0


def pack(weight: torch.Tensor) -> PackedHeadLinears:
    """See `dispatch.pack_head_linears`."""
    return PackedHeadLinears(weight.shape[0], cpu_linear.pack_linear(weight.flatten(0, 1), None))
