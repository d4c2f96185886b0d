"""Launches the row kernels: norms with the residual sum fused in, and the gated activation."""

from __future__ import annotations

import torch
import triton

from swarm_kernels.triton import row_kernels

MAX_WIDTH = 32768
"""Widest row of a norm: a program holds it in registers."""

_ACT_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`; `x` of any shape, its last dimension at most MAX_WIDTH."""
    flat = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _launch(flat, flat, weight, flat, out, eps, add=False)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, `delta` `[n, width]`, contiguous -> `x + delta`, rounded to their dtype, and its RMS norm."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, delta, weight, total, out, eps, add=True)
    return total, out


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    add: bool,
) -> None:
    rows, width = x.shape
    if rows:
        block = int(triton.next_power_of_2(width))
        row_kernels.add_rms_norm[(rows,)](
            x, delta, weight, total, out, eps,
            WIDTH=width, BLOCK=block, ADD=add, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip


def silu_times(gate_up: torch.Tensor) -> torch.Tensor:
    """`[n, 2 width]`, gates then ups, contiguous -> `silu(gate) * up` `[n, width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    row_kernels.silu_times[(rows, triton.cdiv(width, _ACT_BLOCK))](gate_up, out, WIDTH=width, BLOCK=_ACT_BLOCK)
    return out
