"""RMS norms of groups of a row's numbers with gates, as layers with a state have them, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.errors import KernelError


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """`norm(x) weight activation(gate)`, or, with `gate_first`, `norm(x activation(gate)) weight`; the activation is
    SiLU or `sigmoid`. `rounds`: what is normed is rounded to x's dtype before it is multiplied by the weight, and
    after."""

    weight: torch.Tensor  # [size] fp32, of each group, or [groups * size]; contiguous
    size: int  # of a group
    eps: float
    gate_first: bool = False
    sigmoid: bool = False
    rounds: bool = False


def norm_gated(x: torch.Tensor, gate: torch.Tensor, how: GatedNorm) -> torch.Tensor:
    """See `dispatch.norm_gated`."""
    check_norm(x, gate, how)
    wide, gates = x.float(), gate.float()
    gates = torch.sigmoid(gates) if how.sigmoid else torch.nn.functional.silu(gates)
    if how.gate_first:
        wide = wide * gates
    groups = wide.view(len(x), -1, how.size)
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + how.eps)).view(x.shape)
    weight = how.weight.repeat(x.shape[1] // len(how.weight))
    normed = (normed.to(x.dtype) * weight).to(x.dtype).float() if how.rounds else normed * weight
    return (normed if how.gate_first else normed * gates).to(x.dtype)


def check_norm(x: torch.Tensor, gate: torch.Tensor, how: GatedNorm) -> None:
    """Raises KernelError."""
    if x.dim() != 2 or x.shape != gate.shape or x.shape[1] % how.size or len(how.weight) not in (how.size, x.shape[1]):
        raise KernelError(f"a gated norm of groups of {how.size} was given {tuple(x.shape)} and {tuple(gate.shape)}")
