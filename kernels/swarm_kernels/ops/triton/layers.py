"""Whole decoder layers on a GPU: torch's matrix products (cuBLAS) with fused Triton kernels between them.

Per layer of Llama four products and five kernels of ours, six when the context is split; other layers have a few more.
Nothing synchronizes with the device, and launch sizes depend on shapes alone, so a stack can be captured into a CUDA
graph (`graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.backend import LayerCache
from swarm_kernels.ops.base.layer_weights import Activation, GatedMlp, LayerWeights
from swarm_kernels.ops.base.torch_reference import activate, rotary_table
from swarm_kernels.ops.triton import cache_kernels, row_kernels
from swarm_kernels.ops.triton.attention import (
    AttentionShape,
    TileConfig,
    attend_cached,
    commit_tree_slots,
    cut,
    kernel_metadata,
    supports,
    tiling_of,
)

MAX_WIDTH = 32768
"""Widest row of a norm: a program holds a whole row in registers."""

_ACT_BLOCK = 1024


def attention_shape(weights: LayerWeights) -> AttentionShape:
    a = weights.attention
    return AttentionShape(a.heads, a.kv_heads, a.head_dim)


def supports_stack(layers: Sequence[LayerWeights], dtype: torch.dtype) -> bool:
    """Whether the kernels support every layer with activations and KV blocks of `dtype`, all of one attention shape.

    Chunks, sinks and mixtures of experts are not supported, nor is a rounding of hidden states: every sum is rounded to
    `dtype`."""
    alike = len({attention_shape(w) for w in layers}) <= 1  # one tiling serves all layers
    return alike and all(_supports_layer(w, dtype) for w in layers)


def _supports_layer(w: LayerWeights, dtype: torch.dtype) -> bool:
    a, shape = w.attention, attention_shape(w)
    widest = max(w.width, shape.heads * shape.head_dim if a.norm_is_whole else 0)
    plain = a.chunk is None and a.sinks is None and isinstance(w.mlp, GatedMlp) and w.rounding in (None, dtype)
    return plain and supports(shape, dtype) and widest <= MAX_WIDTH


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerWeights],
    cos: torch.Tensor,
    sin: torch.Tensor,
    caches: Sequence[LayerCache],
    plan: AttentionMetadata,
    tiling: TileConfig | None = None,
) -> torch.Tensor:
    """See `LayerStack.run`. `tiling`: None to choose it from the plan's shapes."""
    plan = kernel_metadata(plan)
    tiles = cut(plan, tiling or tiling_of(plan, attention_shape(layers[0]), hidden.dtype))
    hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
    rows = hidden.shape[0]
    delta: torch.Tensor | None = None  # the previous layer's MLP output, not yet added to the residual stream
    for w, (k_blocks, v_blocks) in zip(layers, caches, strict=True):
        a = w.attention
        hidden, normed = _add_and_norm(hidden, delta, w.attn_norm, w.eps)
        commit_tree_slots(k_blocks, v_blocks, plan.copy_from, plan.copy_to)
        packed = a.qkv(normed)
        if a.norm_is_whole:
            _norm_all_heads(packed, w)
        table = rotary_table(cos, sin, a.rope or 0)
        q = norm_rope_and_cache(packed, w, *table, k_blocks, v_blocks, plan.slot_mapping)
        mixed = attend_cached(q, k_blocks, v_blocks, plan, tiles, a.scale, a.window, a.softcap)
        part = _as_added(a.o(mixed.view(rows, -1)), w.attn_post_norm, w)
        hidden, normed = _add_and_norm(hidden, part, w.mlp_norm, w.eps)
        assert isinstance(w.mlp, GatedMlp)  # `supports_stack`
        delta = _as_added(w.mlp.down(_activated(w.mlp.gate_up(normed), w.mlp.activation)), w.mlp_post_norm, w)
    return hidden if delta is None else hidden + delta


def _add_and_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden + delta`, and the same normed."""
    if norm is None:
        total = hidden if delta is None else hidden + delta
        return total, total
    return (hidden, rms_norm(hidden, norm, eps)) if delta is None else add_rms_norm(hidden, delta, norm, eps)


def _as_added(part: torch.Tensor, post_norm: torch.Tensor | None, w: LayerWeights) -> torch.Tensor:
    """The output of a part as it is added to the residual stream."""
    if post_norm is not None:
        part = rms_norm(part, post_norm, w.eps)
    return part if w.residual_scale == 1 else part * w.residual_scale


def _norm_all_heads(packed: torch.Tensor, w: LayerWeights) -> None:
    """Norm all queries of a row at once, and all its keys, in place."""
    a = w.attention
    begin = 0
    for norm, heads in ((a.q_norm, a.heads), (a.k_norm, a.kv_heads)):
        part = packed[:, begin : begin + heads * a.head_dim]
        if norm is not None:
            part.copy_(rms_norm(part, norm, w.eps))
        begin += heads * a.head_dim


def _activated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.SILU:
        return silu_times(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return activate(gate, activation) * up


def norm_rope_and_cache(
    packed: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Head norms, RoPE and KV append in one launch: `packed [n, (H + 2 G) D]` -> queries `[n, H, D]`.

    Keys and values go to their rows' slots; rows with a negative slot are skipped. Norms over all heads are done.
    """
    w, rows = weights.attention, packed.shape[0]
    q_norm, k_norm = (None, None) if w.norm_is_whole else (w.q_norm, w.k_norm)
    stride, keys = packed.shape[1], w.heads * w.head_dim
    q = packed.new_empty(rows, w.heads, w.head_dim)
    cache_kernels.norm_rope_and_cache[(rows, w.heads + 2 * w.kv_heads)](
        packed, packed[:, keys:], packed[:, keys + w.kv_heads * w.head_dim :], q, k_blocks, v_blocks,
        slot_mapping, cos, sin,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm,
        stride, stride, stride, cos.shape[1], weights.eps,
        HEADS=w.heads, KV_HEADS=w.kv_heads, D=w.head_dim, BLOCK_D=attention_shape(weights).block_d,
        BLOCK_SIZE=BLOCK_SIZE, ROPE=w.rope is not None, NORM_Q=q_norm is not None, NORM_K=k_norm is not None,
        num_warps=1,
    )  # fmt: skip
    return q


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `AttentionBackend.rms_norm`; the last dimension at most MAX_WIDTH."""
    flat = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _launch_norm(flat, flat, weight, flat, out, eps, add=False)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, `delta` `[n, width]`, contiguous -> `x + delta`, rounded to their dtype, and its RMS norm."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, delta, weight, total, out, eps, add=True)
    return total, out


def _launch_norm(
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
