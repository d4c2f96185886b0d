"""What happens to keys and values before attention reads them, in Triton: commits, head norms, rotation, append.

Slots below 0 are skipped: padding of a batch whose size is fixed by a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slot_offsets(slot, group, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Where dimension 0 of flat slots lies: in the key pages, and in the value pages. int64."""
    head = (slot // PAGE) * (GROUPS * D * PAGE) + group * (D * PAGE)
    return head + slot % PAGE, head + slot % PAGE * D


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["copy_from", "copy_to"])
def move_slots(
    k_pages, v_pages, copy_from, copy_to, count,
    GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (GROUPS, blocks of D). A program owns its dimensions of all slots, so it can read all before it writes any:
    a slot may be the source of one copy and the target of another. `count` <= BLOCK_C."""
    group = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_C)
    source = tl.load(copy_from + c, mask=c < count, other=-1)
    target = tl.load(copy_to + c, mask=c < count, other=-1)
    here = (source >= 0)[:, None] & (d < D)[None, :]
    k_from, v_from = _slot_offsets(source, group, GROUPS, D, PAGE)
    k_to, v_to = _slot_offsets(target, group, GROUPS, D, PAGE)
    k = tl.load(k_pages + k_from[:, None] + (d * PAGE)[None, :], mask=here)
    v = tl.load(v_pages + v_from[:, None] + d[None, :], mask=here)
    tl.debug_barrier()  # the threads of a program do not run in step
    tl.store(k_pages + k_to[:, None] + (d * PAGE)[None, :], k, mask=here)
    tl.store(v_pages + v_to[:, None] + d[None, :], v, mask=here)


@triton.jit
def _normed(x, norm, rms, d, here):
    """`x / rms * norm`, rounded to x's dtype as the reference does, in fp32."""
    weight = tl.load(norm + d, mask=here, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * rms * weight).to(x.dtype).to(tl.float32)


@triton.jit
def _turned(
    x, norm, cos, sin, rot, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr
):
    """One head at `x [D]`: RMS norm if NORM, then if TURN its first `rot` dimensions rotated; in its own dtype."""
    d = tl.arange(0, BLOCK_D)
    here = d < D
    raw = tl.load(x + d, mask=here, other=0.0)
    value = raw.to(tl.float32)
    rms = 1.0
    if NORM:
        rms = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
        value = _normed(raw, norm, rms, d, here)
    if TURN:
        turning = d < rot
        partner = tl.where(d < rot // 2, d + rot // 2, d - rot // 2)
        other = tl.load(x + partner, mask=turning, other=0.0)
        wide = other.to(tl.float32)
        if NORM:
            wide = _normed(other, norm, rms, partner, turning)
        wide = tl.where(d < rot // 2, -wide, wide)
        turn_cos = tl.load(cos + d, mask=turning, other=1.0).to(tl.float32)
        turn_sin = tl.load(sin + d, mask=turning, other=0.0).to(tl.float32)
        value = tl.where(turning, value * turn_cos + wide * turn_sin, value)
    return value.to(raw.dtype)


@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "v_stride", "rot"],
    do_not_specialize_on_alignment=["q", "k", "v", "write", "cos", "sin"],
)
def place_heads(
    q, k, v, q_out, k_pages, v_pages, write, cos, sin, q_norm, k_norm, q_stride, k_stride, v_stride, rot, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    TURN: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
):  # fmt: skip
    """Grid (rows, HEADS + 2 GROUPS): a program takes one head of one row. Queries go to `q_out [n, HEADS, D]`, keys and
    values to their row's slot, rounded to the cache's dtype. With HEADS = 0 only keys and values are placed."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    here = d < D
    if head < HEADS:
        turned = _turned(
            q + row * q_stride + head * D, q_norm, cos + row * rot, sin + row * rot, rot, eps, D, BLOCK_D, NORM_Q, TURN
        )
        tl.store(q_out + (row * HEADS + head) * D + d, turned, mask=here)
    else:
        slot = tl.load(write + row)
        if head < HEADS + GROUPS:
            group = head - HEADS
            turned = _turned(
                k + row * k_stride + group * D, k_norm, cos + row * rot, sin + row * rot, rot, eps,
                D, BLOCK_D, NORM_K, TURN,
            )  # fmt: skip
            base, _ = _slot_offsets(slot, group, GROUPS, D, PAGE)
            tl.store(k_pages + base + d * PAGE, turned.to(k_pages.dtype.element_ty), mask=here & (slot >= 0))
        else:
            group = head - HEADS - GROUPS
            value = tl.load(v + row * v_stride + group * D + d, mask=here, other=0.0)
            _, base = _slot_offsets(slot, group, GROUPS, D, PAGE)
            tl.store(v_pages + base + d, value.to(v_pages.dtype.element_ty), mask=here & (slot >= 0))
