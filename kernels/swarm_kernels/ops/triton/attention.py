"""Launches paged tree attention: tile sizes, split-KV, buffers. `AttentionBackend.attend` is its contract.

All sizes depend on shapes and never on tensor values, so nothing here synchronizes with the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.torch_reference import REFERENCE
from swarm_kernels.ops.triton import attention_kernels, cache_kernels

MAX_HEAD_DIM = 256
MAX_QUERIES_PER_KV = 64
"""Query heads that may share a KV head: together they are rows of one tile."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PLAN_DTYPES = {
    "positions": torch.int64,
    "sequence_index": torch.int32,
    "context_lens": torch.int32,
    "slot_mapping": torch.int64,
    "block_tables": torch.int32,
    "tree_block_tables": torch.int32,
    "tree_mask": torch.int64,
    "copy_from": torch.int64,
    "copy_to": torch.int64,
    "tree_positions": torch.int32,
}
_LOG2E = 1.4426950408889634
_CUT_BLOCK = 1024  # rows `cut_tiles` scans per iteration
_MAX_COPIES = 512  # in one launch: a program holds them all in registers


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """When a context is split over several programs (split-KV, Flash-Decoding)."""

    max_splits: int = 64  # more parallelism for one long context, against a longer merge
    min_keys: int = 256  # per split: with fewer, the merge costs more than the split saves
    waves: int = 2  # programs aimed at per multiprocessor: hides latency, against smaller splits


SPLIT_POLICY = SplitPolicy()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters of a model's attention that kernels are specialized for."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def block_d(self) -> int:
        return max(16, int(triton.next_power_of_2(self.head_dim)))


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a batch is tiled. `tile`: rows per tile; `tiles`: programs launched, some possibly empty."""

    tile: int
    tiles: int
    splits: int
    block_m: int


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A tiling, and on the device the first row of each tile (`attention_kernels.cut_tiles`)."""

    tiling: TileConfig
    starts: torch.Tensor  # [n + 2] int32


def supports(heads: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether the kernels support attention of this shape."""
    return dtype in _DTYPES and heads.head_dim <= MAX_HEAD_DIM and heads.queries_per_kv <= MAX_QUERIES_PER_KV


def block_n(heads: AttentionShape, dtype: torch.dtype) -> int:
    """Keys per iteration: the K and V tiles of two pipeline stages fit 96 KiB of shared memory. Divides 64."""
    bytes_per_key = heads.block_d * dtype.itemsize
    return min(64, max(16, 16384 // bytes_per_key))


def launch_options(heads: AttentionShape, dtype: torch.dtype, block_m: int) -> dict[str, int]:
    """Warps per program and software-pipeline stages."""
    return {"num_warps": 8 if block_m * heads.block_d > 8192 else 4, "num_stages": 2}


def choose_tiling(
    rows: int, sequences: int, context: int, heads: AttentionShape, dtype: torch.dtype, processors: int
) -> TileConfig:
    """A tiling for `rows` rows of `sequences` sequences with at most `context` committed keys each.

    Tiles are as tall as the average sequence, so that its rows share loaded keys; contexts are split until every one of
    the device's `processors` has work.
    """
    tallest = 32 if dtype == torch.float32 else 64
    query_rows = -(-rows // max(1, sequences)) * heads.queries_per_kv
    block_m = max(
        16, min(tallest, int(triton.next_power_of_2(query_rows))), int(triton.next_power_of_2(heads.queries_per_kv))
    )
    tile = block_m // heads.queries_per_kv
    tiles = min(rows, -(-rows // tile) + sequences)
    policy = SPLIT_POLICY
    limit = min(policy.waves * processors // (tiles * heads.kv_heads), context // policy.min_keys, policy.max_splits)
    splits = 1 << (max(1, limit).bit_length() - 1)
    return TileConfig(tile, tiles, splits, block_m)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 64 in Triton's interpreter, so that tests exercise splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 64


def tiling_of(plan: AttentionMetadata, heads: AttentionShape, dtype: torch.dtype) -> TileConfig:
    """The tiling for a plan, from its shapes alone."""
    sequences, width = plan.block_tables.shape
    return choose_tiling(plan.rows, sequences, width * BLOCK_SIZE, heads, dtype, processors(plan.block_tables.device))


def wider_dtype(q: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The dtype that limits tile sizes: products use the queries' dtype, loads the cache's."""
    return q if q.itemsize >= cache.itemsize else cache


def kernel_metadata(plan: AttentionMetadata) -> AttentionMetadata:
    """`plan` itself if its tensors are contiguous and of `_PLAN_DTYPES`, else a converted copy."""
    tensors = [getattr(plan, name).to(dtype).contiguous() for name, dtype in _PLAN_DTYPES.items()]
    same = all(tensor is getattr(plan, name) for name, tensor in zip(_PLAN_DTYPES, tensors, strict=True))
    return plan if same else AttentionMetadata(*tensors)


def cut(plan: AttentionMetadata, tiling: TileConfig) -> SplitPlan:
    """Compute the tiles of a plan on the device."""
    starts = torch.empty(plan.rows + 2, dtype=torch.int32, device=plan.sequence_index.device)
    attention_kernels.cut_tiles[(1,)](plan.sequence_index, starts, plan.rows, TILE=tiling.tile, BLOCK=_CUT_BLOCK)
    return SplitPlan(tiling, starts)


def commit_tree_slots(
    k_blocks: torch.Tensor, v_blocks: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor
) -> None:
    """See `AttentionBackend.commit_tree_slots`. Negative slots are skipped, up to `_MAX_COPIES` copies."""
    count = copy_from.shape[0]
    if count == 0:
        return
    if count > _MAX_COPIES:
        REFERENCE.commit_tree_slots(k_blocks, v_blocks, copy_from, copy_to)
        return
    _, kv_heads, dim, _ = k_blocks.shape
    block_c = max(16, int(triton.next_power_of_2(count)))
    block_d = min(int(triton.next_power_of_2(dim)), max(16, 4096 // block_c))
    cache_kernels.commit_tree_slots[(kv_heads, triton.cdiv(dim, block_d))](
        k_blocks, v_blocks, copy_from, copy_to, count,
        KV_HEADS=kv_heads, D=dim, BLOCK_SIZE=BLOCK_SIZE, BLOCK_C=block_c, BLOCK_D=block_d,
    )  # fmt: skip


def append(
    k: torch.Tensor, v: torch.Tensor, k_blocks: torch.Tensor, v_blocks: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `torch_reference.append`; rows with a negative slot are skipped."""
    rows, kv_heads, dim = k.shape
    k, v = _dense_heads(k), _dense_heads(v)
    cache_kernels.norm_rope_and_cache[(rows, 2 * kv_heads)](
        k, k, v, k, k_blocks, v_blocks, slot_mapping, k, k, k, k, 0, k.stride(0), v.stride(0), 0, 0.0,
        HEADS=0, KV_HEADS=kv_heads, D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_SIZE=BLOCK_SIZE,
        ROPE=False, NORM_Q=False, NORM_K=False, num_warps=1,
    )  # fmt: skip


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """`[n, heads, D]` with the heads of a row contiguous; rows may have a larger stride."""
    dense = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if dense else x.contiguous()


def attend_cached(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
    tiles: SplitPlan,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of `q [n, H, D]` whose keys and values are already in the cache -> `[n, H, D]`, contiguous."""
    q = _dense_heads(q)
    tree_mask = plan.tree_mask if sliding_window is None else window_in_trees(plan, sliding_window)
    rows, count, dim = q.shape
    heads = AttentionShape(count, k_blocks.shape[1], dim)
    tiling, widest = tiles.tiling, wider_dtype(q.dtype, k_blocks.dtype)
    out = q.new_empty(rows, count, dim)
    sums = stats = out
    if tiling.splits > 1:
        sums = q.new_empty(tiling.splits, rows, count, dim, dtype=torch.float32)
        stats = q.new_empty(tiling.splits, rows, count, 2, dtype=torch.float32)
    factor, cap = (scale * _LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2E)
    attention_kernels.attend_tiles[(tiling.tiles, heads.kv_heads, tiling.splits)](
        q, k_blocks, v_blocks, sums, stats, plan.positions, plan.sequence_index, plan.context_lens,
        plan.block_tables, plan.tree_block_tables, tree_mask, tiles.starts, rows, plan.block_tables.shape[1],
        plan.tree_block_tables.shape[1], tree_mask.shape[1], sliding_window or 0, q.stride(0), factor, cap,
        KV_HEADS=heads.kv_heads, QUERIES_PER_KV=heads.queries_per_kv, D=dim, BLOCK_D=heads.block_d,
        BLOCK_M=tiling.block_m,
        BLOCK_N=block_n(heads, widest), BLOCK_SIZE=BLOCK_SIZE, SPLIT=tiling.splits > 1,
        WINDOWED=sliding_window is not None, CAPPED=softcap is not None, DOT=dot_type(q.dtype),
        **launch_options(heads, widest, tiling.block_m),
    )  # fmt: skip
    if tiling.splits > 1:
        attention_kernels.merge_splits[(rows * count,)](
            sums, stats, out, rows * count, D=dim, BLOCK_D=heads.block_d, SPLITS=tiling.splits
        )
    return out


def window_in_trees(plan: AttentionMetadata, window: int) -> torch.Tensor:
    """The plan's tree mask without the slots at distance >= window, which a tree longer than the window has."""
    mask = plan.tree_mask
    slots = plan.tree_positions.shape[1]
    if not mask.shape[1] or not slots:
        return mask
    near = plan.tree_positions[plan.sequence_index.long()] > (plan.positions - window)[:, None]  # [n, slots]
    bits = torch.zeros(mask.shape[0], mask.shape[1] * 64, dtype=torch.int64, device=mask.device)
    bits[:, :slots] = near[:, : bits.shape[1]]
    words = bits.view(mask.shape[0], -1, 64) << torch.arange(64, device=mask.device)
    return mask & words.sum(-1)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Input dtype of the matrix products. Triton's interpreter has no bf16 products, so it uses fp32."""
    return tl.float32 if knobs.runtime.interpret and dtype == torch.bfloat16 else _DTYPES[dtype]
