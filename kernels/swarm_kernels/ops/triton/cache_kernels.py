"""Triton kernels that write the KV cache before attention: commits of tree slots, and head norm + RoPE + append.

Negative slots are skipped: they pad a batch to the fixed size of a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slot_offsets(slot, kv_head, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Offsets of dimension 0 of flat slots: in the key blocks, and in the value blocks. int64."""
    head = (slot // BLOCK_SIZE) * (KV_HEADS * D * BLOCK_SIZE) + kv_head * (D * BLOCK_SIZE)
    return head + slot % BLOCK_SIZE, head + slot % BLOCK_SIZE * D


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["copy_from", "copy_to"])
def commit_tree_slots(
    k_blocks, v_blocks, copy_from, copy_to, count,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, blocks of D). A program handles its dimensions of all slots, so it can read all before it writes
    any: a slot may be the source of one copy and the target of another. `count` <= BLOCK_C."""
    kv_head = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_C)
    source = tl.load(copy_from + c, mask=c < count, other=-1)
    target = tl.load(copy_to + c, mask=c < count, other=-1)
    here = (source >= 0)[:, None] & (d < D)[None, :]
    k_from, v_from = _slot_offsets(source, kv_head, KV_HEADS, D, BLOCK_SIZE)
    k_to, v_to = _slot_offsets(target, kv_head, KV_HEADS, D, BLOCK_SIZE)
    k = tl.load(k_blocks + k_from[:, None] + (d * BLOCK_SIZE)[None, :], mask=here)
    v = tl.load(v_blocks + v_from[:, None] + d[None, :], mask=here)
    tl.debug_barrier()  # the warps of a program are not in lockstep
    tl.store(k_blocks + k_to[:, None] + (d * BLOCK_SIZE)[None, :], k, mask=here)
    tl.store(v_blocks + v_to[:, None] + d[None, :], v, mask=here)


@triton.jit
def _rms_normed(x, norm, rms, d, here):
    """`x / rms * norm`, rounded to x's dtype as the reference does, in fp32."""
    weight = tl.load(norm + d, mask=here, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * rms * weight).to(x.dtype).to(tl.float32)


@triton.jit
def _norm_rope(
    x, norm, cos, sin, rot, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr
):
    """One head at `x [D]`: RMS norm if NORM, then RoPE on its first `rot` dimensions if ROPE; in its own dtype."""
    d = tl.arange(0, BLOCK_D)
    here = d < D
    raw = tl.load(x + d, mask=here, other=0.0)
    value = raw.to(tl.float32)
    rms = 1.0
    if NORM:
        rms = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
        value = _rms_normed(raw, norm, rms, d, here)
    if ROPE:
        rotates = d < rot
        partner = tl.where(d < rot // 2, d + rot // 2, d - rot // 2)
        other = tl.load(x + partner, mask=rotates, other=0.0)
        wide = other.to(tl.float32)
        if NORM:
            wide = _rms_normed(other, norm, rms, partner, rotates)
        wide = tl.where(d < rot // 2, -wide, wide)
        rope_cos = tl.load(cos + d, mask=rotates, other=1.0).to(tl.float32)
        rope_sin = tl.load(sin + d, mask=rotates, other=0.0).to(tl.float32)
        value = tl.where(rotates, value * rope_cos + wide * rope_sin, value)
    return value.to(raw.dtype)


@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "v_stride", "rot"],
    do_not_specialize_on_alignment=["q", "k", "v", "slot_mapping", "cos", "sin"],
)
def norm_rope_and_cache(
    q, k, v, q_out, k_blocks, v_blocks, slot_mapping, cos, sin, q_norm, k_norm, q_stride, k_stride, v_stride, rot, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROPE: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
):  # fmt: skip
    """Grid (rows, HEADS + 2 KV_HEADS): a program handles one head of one row. Queries go to `q_out [n, HEADS, D]`, keys
    and values to their row's slot, rounded to the cache's dtype. With HEADS = 0 only keys and values are written."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    here = d < D
    if head < HEADS:
        rotated = _norm_rope(
            q + row * q_stride + head * D, q_norm, cos + row * rot, sin + row * rot, rot, eps, D, BLOCK_D, NORM_Q, ROPE
        )
        tl.store(q_out + (row * HEADS + head) * D + d, rotated, mask=here)
    else:
        slot = tl.load(slot_mapping + row)
        if head < HEADS + KV_HEADS:
            kv_head = head - HEADS
            rotated = _norm_rope(
                k + row * k_stride + kv_head * D, k_norm, cos + row * rot, sin + row * rot, rot, eps,
                D, BLOCK_D, NORM_K, ROPE,
            )  # fmt: skip
            base, _ = _slot_offsets(slot, kv_head, KV_HEADS, D, BLOCK_SIZE)
            tl.store(k_blocks + base + d * BLOCK_SIZE, rotated.to(k_blocks.dtype.element_ty), mask=here & (slot >= 0))
        else:
            kv_head = head - HEADS - KV_HEADS
            value = tl.load(v + row * v_stride + kv_head * D + d, mask=here, other=0.0)
            _, base = _slot_offsets(slot, kv_head, KV_HEADS, D, BLOCK_SIZE)
            tl.store(v_blocks + base + d, value.to(v_blocks.dtype.element_ty), mask=here & (slot >= 0))
