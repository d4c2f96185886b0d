"""Argument validation shared by all ops; it runs before any kernel. Knows no backend.

A wrong shape or slot is a caller's bug that could write into another sequence's keys, so it raises KernelError. Shapes
are compared at every call, reading each tensor's shape once: that costs a tenth of a microsecond, against ten for the
attention over a short context. The contents of a plan are validated once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.errors import KernelError
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.layer_weights import GatedMlp, LayerWeights, Linear, Mixture

PLAN_ERRORS = {
    10: "a row's sequence is not in the block table",
    11: "a row's context is longer than its sequence's blocks",
    12: "a row is written to a slot beyond the cache",
    13: "a committed block is beyond the cache",
    14: "a tree block is beyond the cache",
    15: "a row's tree mask reaches beyond its sequence's tree blocks",
    16: "a slot to copy is beyond the cache",
}
"""Message of each status of the C++ `swarm_check_plan`; `check_plan` raises the same."""


def check_cache(k_blocks: torch.Tensor, v_blocks: torch.Tensor) -> torch.Size:
    """Keys `[blocks, G, D, BLOCK_SIZE]`, values `[blocks, G, BLOCK_SIZE, any]`; same dtype and device, contiguous.

    -> the keys' shape.
    """
    shape = k_blocks.shape
    if len(shape) != 4 or shape[3] != BLOCK_SIZE:
        raise KernelError(f"key blocks have shape {tuple(shape)}, not [blocks, kv heads, head size, {BLOCK_SIZE}]")
    blocks, groups, dim, _ = shape
    if not (groups and dim):
        raise KernelError(f"attention with {groups} key heads of size {dim} cannot be computed")
    if v_blocks.dim() != 4 or v_blocks.shape[:3] != (blocks, groups, BLOCK_SIZE):
        raise KernelError(f"value blocks have shape {tuple(v_blocks.shape)}, not {(blocks, groups, BLOCK_SIZE, dim)}")
    if v_blocks.dtype is not k_blocks.dtype or v_blocks.device != k_blocks.device:
        raise KernelError("key and value blocks differ in dtype or device")
    if not (k_blocks.is_contiguous() and v_blocks.is_contiguous()):
        raise KernelError("key and value blocks must be contiguous")
    return shape


def check_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
    latent: int = 0,
) -> torch.Size:
    """`q [n, H, D]`, `k` and `v` `[n, G, D]` for the plan's n rows and this cache; H a multiple of G; -> the shape of
    the cache's keys. `latent`: if not 0, so many first numbers of a key are its value, and `v` is of any size."""
    cache = check_cache(k_blocks, v_blocks)
    _, groups, dim, _ = cache
    rows, queries, shape, value_dim = plan.rows, q.shape, k.shape, v_blocks.shape[3]
    if latent > dim or not (latent or value_dim == dim):
        raise KernelError(f"values of {latent or value_dim} numbers do not fit keys of {dim}")
    if shape != (rows, groups, dim) or v.shape != (rows, groups, value_dim):
        raise KernelError(f"keys {tuple(shape)} or values {tuple(v.shape)} are not {(rows, groups, dim)}")
    if len(queries) != 3 or queries[0] != rows or queries[2] != dim or queries[1] % groups:
        raise KernelError(f"queries have shape {tuple(queries)}, which does not fit {tuple(shape)} keys")
    if not q.device == k.device == v.device == k_blocks.device:
        raise KernelError("queries, keys, values and blocks are on different devices")
    check_plan_shapes(plan)
    return cache


def check_layer(weights: LayerWeights, k_blocks: torch.Tensor, v_blocks: torch.Tensor) -> None:
    """A layer's linears and norms fit each other, and the cache has its heads."""
    check_cache(k_blocks, v_blocks)
    a = weights.attention
    size = (a.kv_heads, a.head_dim)
    if k_blocks.shape[1:3] != size or (*v_blocks.shape[1::2],) != size or a.heads % a.kv_heads:
        raise KernelError(f"blocks of shape {tuple(k_blocks.shape)} are not of this layer's heads")
    width, dim = weights.width, a.head_dim
    attended, shared = a.heads * dim, a.kv_heads * dim
    _check_linears((a.qkv, a.o), [(width, attended + 2 * shared), (attended, width)])
    if isinstance(weights.mlp, Mixture):
        _check_mixture(weights.mlp, width)
    else:
        _check_gated_mlp(weights.mlp, width)
    for norm in weights.norms:
        _check_vector("a norm", norm, width)
    _check_vector("q_norm", a.q_norm, attended if a.norm_is_whole else dim)
    _check_vector("k_norm", a.k_norm, shared if a.norm_is_whole else dim)
    check_variant(a.heads, a.window, a.chunk, a.sinks)


def _check_gated_mlp(mlp: GatedMlp, width: int) -> None:
    inner = mlp.down.in_features
    _check_linears((mlp.gate_up, mlp.down), [(width, 2 * inner), (inner, width)])


def _check_mixture(mixture: Mixture, width: int) -> None:
    count = mixture.experts.count
    mixture.routing.check(count)
    _check_linears((mixture.router,), [(width, count)])
    _check_vector("the correction of scores", mixture.correction, count)
    if mixture.experts.hidden != width:
        raise KernelError(f"experts of {mixture.experts.hidden} inputs do not fit a decoder layer of width {width}")
    if mixture.shared is not None:
        _check_gated_mlp(mixture.shared, width)
    if mixture.shared_gate is not None:
        _check_linears((mixture.shared_gate,), [(width, 1)])


def _check_linears(linears: Sequence[Linear], needed: list[tuple[int, int]]) -> None:
    shapes = [(linear.in_features, linear.out_features) for linear in linears]
    if shapes != needed:
        raise KernelError(f"the linear layers of a decoder layer do not fit each other: {shapes}, not {needed}")


def check_variant(heads: int, window: int | None, chunk: int | None, sinks: torch.Tensor | None) -> None:
    """A window or chunks of at least a token, not both; a sink for each query head."""
    if sinks is not None and sinks.shape != (heads,):
        raise KernelError(f"sinks of shape {tuple(sinks.shape)} do not fit {heads} query heads")
    if (window is not None and (window < 1 or chunk is not None)) or (chunk is not None and chunk < 1):
        raise KernelError(f"attention with a window of {window} and chunks of {chunk} tokens cannot be computed")


def _check_vector(name: str, vector: torch.Tensor | None, size: int) -> None:
    if vector is not None and vector.shape != (size,):
        raise KernelError(f"{name} of a decoder layer has shape {tuple(vector.shape)}, not {(size,)}")


def check_stack(layers: Sequence[LayerWeights], caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each layer fits its cache, and all have one width and head size."""
    for weights, (k_blocks, v_blocks) in zip(layers, caches, strict=True):
        check_layer(weights, k_blocks, v_blocks)
        first = layers[0]
        if (weights.width, weights.attention.head_dim) != (first.width, first.attention.head_dim):
            raise KernelError("the layers of a stack differ in width or head size")


def check_step(
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    width: int,
    head_dim: int,
    tables: int,
    plan: AttentionMetadata,
) -> None:
    """`hidden [n, width]`, `cos` and `sin` `[n, rot]` or `[tables, n, rot]` for the plan's n rows; rot even and at most
    the head size; as many tables as the layers name."""
    check_plan_shapes(plan)
    if hidden.shape != (plan.rows, width):
        raise KernelError(f"hidden states have shape {tuple(hidden.shape)}, not {(plan.rows, width)}")
    given = cos.shape[0] if cos.dim() == 3 else 1
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or cos.shape[-2] != plan.rows or given < tables:
        raise KernelError(
            f"rotary tables are {tuple(cos.shape)} and {tuple(sin.shape)} for {plan.rows} rows and {tables} kinds"
        )
    if cos.shape[-1] % 2 or cos.shape[-1] > head_dim:
        raise KernelError(f"{cos.shape[-1]} rotary dimensions do not fit a head of {head_dim}")
    if not hidden.device == cos.device == sin.device == plan.positions.device:
        raise KernelError("hidden states, rotary tables and plan are on different devices")


_last_shaped: AttentionMetadata | None = None  # the last that passed


def check_plan_shapes(plan: AttentionMetadata) -> None:
    """The plan's tensors agree on the number of rows, sequences and copies."""
    global _last_shaped
    if plan is _last_shaped:
        return
    rows = plan.rows
    per_row = (plan.sequence_index, plan.context_lens, plan.slot_mapping, plan.tree_mask)
    if any(tensor.shape[0] != rows for tensor in per_row) or plan.tree_mask.dim() != 2:
        raise KernelError(f"a plan of {rows} rows has tensors of another length")
    if (
        plan.block_tables.dim() != 2
        or plan.tree_block_tables.dim() != 2
        or plan.block_tables.shape[0] != plan.tree_block_tables.shape[0]
    ):
        raise KernelError("the block tables of a plan disagree on the number of sequences")
    if plan.tree_positions.shape != (plan.tree_block_tables.shape[0], plan.tree_block_tables.shape[1] * BLOCK_SIZE):
        raise KernelError("a plan does not name the positions of its tree slots")
    if plan.copy_from.shape != plan.copy_to.shape:
        raise KernelError("a plan copies from and to different numbers of slots")
    _last_shaped = plan


def check_slots(copy_from: torch.Tensor, copy_to: torch.Tensor, blocks: int) -> None:
    """As many sources as targets, all of them slots of a cache of `blocks` blocks."""
    if copy_from.shape != copy_to.shape:
        raise KernelError("there are not as many slots to copy from as to copy to")
    if copy_from.numel() and bool(_outside(torch.stack((copy_from, copy_to)), blocks * BLOCK_SIZE)):
        raise KernelError(PLAN_ERRORS[16])


_checked: tuple[AttentionMetadata, int] | None = None  # the last: every layer of a batch checks the same plan


def check_plan(plan: AttentionMetadata, blocks: int) -> None:
    """The plan's indices and masks lie within a cache of `blocks` blocks: `swarm_check_plan` in torch."""
    global _checked
    last = _checked
    if last is not None and last[0] is plan and last[1] == blocks:
        return
    slots = blocks * BLOCK_SIZE
    tree_slots = plan.tree_block_tables.shape[1] * BLOCK_SIZE
    faults = torch.stack(
        (
            _outside(plan.sequence_index, plan.block_tables.shape[0]),
            _outside(plan.context_lens, plan.block_tables.shape[1] * BLOCK_SIZE + 1),
            _outside(plan.slot_mapping, slots),
            _outside(plan.block_tables, blocks),
            _outside(plan.tree_block_tables, blocks),
            _beyond(plan.tree_mask, tree_slots),
            _outside(plan.copy_from, slots) | _outside(plan.copy_to, slots),
        )
    )
    for code, fault in zip(sorted(PLAN_ERRORS), faults.tolist(), strict=True):
        if fault:
            raise KernelError(PLAN_ERRORS[code])
    _checked = (plan, blocks)


def mark_validated(plan: AttentionMetadata, blocks: int) -> None:
    """Skip `check_plan` for a plan made by our own cache: reading its tensors would make the host wait for the GPU."""
    global _checked
    _checked = (plan, blocks)


def _outside(values: torch.Tensor, end: int) -> torch.Tensor:
    return ((values < 0) | (values >= end)).any()


def _beyond(mask: torch.Tensor, slots: int) -> torch.Tensor:
    """Whether any bit of `mask [n, words]` is set at or beyond `slots`."""
    whole, rest = divmod(slots, 64)
    late = mask[:, whole + 1 :].any()
    if rest and whole < mask.shape[1]:
        return late | (mask[:, whole] >> rest != 0).any()
    return late | mask[:, whole : whole + 1].any()
