"""A layer's mixture of experts: what it computes, and the op in plain torch.

Rows are grouped by expert, so only the experts that some row chose are read. Routing (which experts, with which scores)
is the model's. `cpu.cpu_experts` has the compiled op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F

from swarm.errors import KernelError
from swarm_kernels.ops.base.layer_weights import Linear


class GatingKind(IntEnum):
    """The numbers are those of `SwarmGatingKind` in cpu/abi.h."""

    SWIGLU = 0
    GEGLU_TANH = 1
    RELU_SQUARED = 2


@dataclass(frozen=True, slots=True)
class Gating:
    """What an expert does between its two linear layers.

    SWIGLU: of gates g and values u, the halves of the first layer's outputs, `g sigmoid(alpha g) (u + shift)` with g at
    most `limit` and u within it: SiLU gating, gpt-oss's (alpha 1.702, shift 1, limit 7) and others'. GEGLU_TANH:
    `gelu(g) u` by tanh. RELU_SQUARED: `max(x, 0)^2`, no gates.
    """

    kind: GatingKind = GatingKind.SWIGLU
    alpha: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0

    @property
    def has_gates(self) -> bool:
        return self.kind != GatingKind.RELU_SQUARED

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., 2 I]`, or `[..., I]` without gates -> `[..., I]`."""
        if self.kind == GatingKind.RELU_SQUARED:
            return F.relu(x).square()
        gate, up = x.chunk(2, -1)
        if self.kind == GatingKind.GEGLU_TANH:
            return F.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + self.shift)


@dataclass(frozen=True, slots=True, eq=False)
class PlainExperts:
    """`layer_weights.Experts` in plain torch, on any device. `first`: hidden -> `[gates; values]`; `second`: back."""

    first: Sequence[Linear]
    second: Sequence[Linear]
    gating: Gating

    @property
    def count(self) -> int:
        return len(self.first)

    @property
    def hidden(self) -> int:
        return self.first[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.first, *self.second))

    def __call__(self, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_routing(x, index, scores, self.hidden)
        outputs = torch.zeros(*index.shape, x.shape[1], device=x.device)
        for expert in sorted(set(index.flatten().tolist())):
            if not 0 <= expert < self.count:
                raise KernelError(f"expert {expert} was chosen of {self.count}")
            rows, places = (index == expert).nonzero(as_tuple=True)
            outputs[rows, places] = self.second[expert](self.gating(self.first[expert](x[rows].float())))
        return add_up(outputs, scores).to(x.dtype)


def add_up(outputs: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """`outputs [n, k, hidden]` fp32 of rows' experts -> their sums times `scores [n, k]`, in their order."""
    total = torch.zeros_like(outputs[:, 0])
    for place in range(outputs.shape[1]):
        total = total + scores[:, place, None].float() * outputs[:, place]
    return total


def check_routing(x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor, hidden: int) -> None:
    """Raises KernelError."""
    fits = x.dim() == 2 and x.shape[1] == hidden and index.shape == scores.shape and index.dim() == 2
    if not fits or index.shape[0] != x.shape[0] or index.dtype != torch.int64:
        raise KernelError(
            f"experts of {hidden} inputs were given {tuple(x.shape)}, {index.dtype} {tuple(index.shape)} and scores "
            f"{tuple(scores.shape)}"
        )


def check_experts(first: Sequence[Linear], second: Sequence[Linear], gating: Gating) -> None:
    """Raises KernelError unless they are experts of one shape."""
    shapes = {
        (a.in_features, a.out_features, b.in_features, b.out_features) for a, b in zip(first, second, strict=True)
    }
    hidden, wide, width, out = next(iter(shapes), (0, 0, 0, 0))
    if len(shapes) != 1 or out != hidden or wide != width * (2 if gating.has_gates else 1):
        raise KernelError(f"these are no experts of one shape: {sorted(shapes)}")
