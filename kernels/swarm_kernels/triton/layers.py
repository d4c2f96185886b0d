"""Whole decoder layers on a GPU: torch's matrix products (cuBLAS), everything between them in our kernels.

Five launches of ours and four products a layer, six when the context is split. Nothing waits for the device, and the
sizes launched depend on shapes alone, so a stack can be captured into a CUDA graph (`graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm_kernels.batch import PAGE, BatchPlan
from swarm_kernels.reference import LayerWeights
from swarm_kernels.triton import cache_kernels
from swarm_kernels.triton.attention import Heads, Tiling, attend_placed, covers, cut, move_slots, plain, tiling_of
from swarm_kernels.triton.rows import MAX_WIDTH, add_rms_norm, rms_norm, silu_times

Cache = tuple[torch.Tensor, torch.Tensor]
"""Key and value pages of one layer."""


def heads_of(weights: LayerWeights) -> Heads:
    return Heads(weights.heads, weights.kv_heads, weights.head_dim)


def covers_layers(layers: Sequence[LayerWeights], dtype: torch.dtype) -> bool:
    """Whether every layer runs on these kernels with activations and pages of `dtype`."""
    return all(covers(heads_of(w), dtype) and w.o.out_features <= MAX_WIDTH for w in layers)


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerWeights],
    cos: torch.Tensor,
    sin: torch.Tensor,
    caches: Sequence[Cache],
    plan: BatchPlan,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """See `ops.decoder_layers`. `tiling`: None to choose it by the plan's shapes."""
    plan = plain(plan)
    tiles = cut(plan, tiling or tiling_of(plan, heads_of(layers[0]), hidden.dtype))
    hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
    rows = hidden.shape[0]
    delta: torch.Tensor | None = None  # what the layer before adds to the residual stream
    for w, (k_pages, v_pages) in zip(layers, caches, strict=True):
        if delta is None:
            normed = rms_norm(hidden, w.attn_norm, w.eps)
        else:
            hidden, normed = add_rms_norm(hidden, delta, w.attn_norm, w.eps)
        move_slots(k_pages, v_pages, plan.copy_from, plan.copy_to)
        q = place(w.qkv(normed), w, cos, sin, k_pages, v_pages, plan.write)
        mixed = attend_placed(q, k_pages, v_pages, plan, tiles, w.scale, None, None)
        hidden, normed = add_rms_norm(hidden, w.o(mixed.view(rows, -1)), w.mlp_norm, w.eps)
        delta = w.down(silu_times(w.gate_up(normed)))
    return hidden if delta is None else hidden + delta


def place(
    packed: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    write: torch.Tensor,
) -> torch.Tensor:
    """Head norms, rotation and append in one launch: `packed [n, (H + 2 G) D]` -> queries `[n, H, D]`.

    Keys and values go to their rows' slots; rows whose slot is below 0 are skipped.
    """
    w, rows = weights, packed.shape[0]
    stride, keys = packed.shape[1], w.heads * w.head_dim
    q = packed.new_empty(rows, w.heads, w.head_dim)
    cache_kernels.place_heads[(rows, w.heads + 2 * w.kv_heads)](
        packed, packed[:, keys:], packed[:, keys + w.kv_heads * w.head_dim :], q, k_pages, v_pages, write, cos, sin,
        cos if w.q_norm is None else w.q_norm, cos if w.k_norm is None else w.k_norm,
        stride, stride, stride, cos.shape[1], w.eps,
        HEADS=w.heads, GROUPS=w.kv_heads, D=w.head_dim, BLOCK_D=heads_of(w).block_d, PAGE=PAGE,
        TURN=True, NORM_Q=w.q_norm is not None, NORM_K=w.k_norm is not None, num_warps=1,
    )  # fmt: skip
    return q
