"""Fused row-wise Triton kernels between the matrix products of a layer: each row is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm(x, delta, weight, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """One program per row: `total = x + delta` if ADD, then `out = total / rms(total) * weight`, in fp32 inside."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    d = tl.arange(0, BLOCK)
    here = d < WIDTH
    value = tl.load(x + row + d, mask=here, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(delta + row + d, mask=here, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(total + row + d, value, mask=here)
    wide = value.to(tl.float32)
    wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps))
    wide = wide * tl.load(weight + d, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row + d, wide.to(out.dtype.element_ty), mask=here)


@triton.jit
def silu_times(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks): `gate_up [n, 2 WIDTH]` -> `silu(gate) * up` `[n, WIDTH]`."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = d < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + d, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + d, mask=here, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + d, value.to(out.dtype.element_ty), mask=here)
