"""A linear layer of its own for each attention head, in plain torch: the absorbed projections of multi-head latent
attention. `cpu.cpu_head_linears` is the compiled one, `dispatch.pack_head_linears` picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class HeadLinears(Protocol):
    """`y[:, h] = x[:, h] W[h]^T` for every head h, weights packed once."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`x [n, H, K]` of any float dtype -> `out [n, H, N]`, which may be a part of a larger tensor. Numbers of a
        head lie next to each other in both."""
        ...

    def matrix(self) -> torch.Tensor:
        """The weights, `[H, N, K]`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainHeadLinears:
    """In the weights' dtype, on any device."""

    weight: torch.Tensor  # [H, N, K]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        by_head = torch.bmm(x.transpose(0, 1).to(self.weight.dtype), self.weight.transpose(1, 2))
        out.copy_(by_head.transpose(0, 1))

    def matrix(self) -> torch.Tensor:
        return self.weight
