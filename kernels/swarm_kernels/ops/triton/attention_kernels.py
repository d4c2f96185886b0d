"""Paged tree attention as Triton kernels: query tiles, split-KV over the context, and the merge of splits.

A program computes one tile (consecutive rows of one sequence, with all query heads that share a KV head) and one split
of the context; the last split also computes the tree. Softmax is in base 2. Offsets into the cache are int64: it may
hold more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

_VARYING = ["rows", "max_blocks", "max_tree_blocks", "words", "window", "q_stride"]  # change from batch to batch


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["sequence_index", "tiles"])
def cut_tiles(sequence_index, tiles, rows, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """`tiles[0]`: their number; `tiles[1 + t]`: first row of tile t; after the last one, `rows`. One program.

    A tile begins where the sequence changes and at every multiple of TILE rows.
    """
    done = 0
    for base in range(0, rows, BLOCK):
        row = base + tl.arange(0, BLOCK)
        here = row < rows
        own = tl.load(sequence_index + row, mask=here, other=-1)
        before = tl.load(sequence_index + row - 1, mask=here & (row > 0), other=-1)
        first = here & ((own != before) | (row % TILE == 0))
        count = first.to(tl.int32)
        tl.store(tiles + done + tl.cumsum(count, 0), row, mask=first)
        done += tl.sum(count, 0)
    tl.store(tiles, done)
    tl.store(tiles + 1 + done, rows)


@triton.jit
def _tanh(x):
    shrunk = tl.exp2(tl.abs(x) * -2.885390081777927)  # exp(-2 |x|), which cannot overflow
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _online_softmax_step(
    q, k, v, visible, acc, row_max, row_sum, scale, cap, CAPPED: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr
):
    """Online softmax over one tile of keys: `q [M, D]`, `k [D, N]`, `v [N, D]`, `visible [M, N]`."""
    scores = tl.dot(q, k.to(DOT), input_precision="ieee") * scale
    if CAPPED:
        scores = _tanh(scores) * cap
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoids inf - inf
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None] + tl.dot(weights.to(ROUND).to(DOT), v.to(DOT), input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _load_block(
    k_blocks, v_blocks, kv_block, slot, kv_head, in_range, seen,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys `[D, N]` and values `[N, D]` of consecutive slots `slot [N]`, aligned to BLOCK_SIZE, in `kv_block [N]`.

    `in_range [N]` must be equal for all slots of a KV block, or the loads of keys are not vectorized. Values are loaded
    only where `seen [N]`: a masked value may be an infinity, and zero times infinity is NaN.
    """
    d = tl.arange(0, BLOCK_D)
    head = kv_block.to(tl.int64) * (KV_HEADS * D * BLOCK_SIZE) + kv_head * (D * BLOCK_SIZE)
    offset = slot % BLOCK_SIZE
    k_base = tl.max_contiguous(tl.multiple_of(head + offset, [BLOCK_SIZE]), [BLOCK_SIZE])
    k = tl.load(
        k_blocks + k_base[None, :] + (d * BLOCK_SIZE)[:, None], mask=in_range[None, :] & (d < D)[:, None], other=0.0
    )
    v = tl.load(v_blocks + (head + offset * D)[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
    return k, v


@triton.jit
def _attend_context(
    q, acc, row_max, row_sum, k_blocks, v_blocks, table, context_len, lowest, begin, end, kv_head, scale, cap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Committed keys `[begin, end)` of one sequence; row m sees `[lowest[m], context_len[m])` of them."""
    for first in range(begin, end, BLOCK_N):
        key = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
        in_range = (key // BLOCK_SIZE) * BLOCK_SIZE < end
        seen = key < end
        kv_block = tl.load(table + key // BLOCK_SIZE, mask=in_range, other=0)
        k, v = _load_block(k_blocks, v_blocks, kv_block, key, kv_head, in_range, seen, KV_HEADS, D, BLOCK_D, BLOCK_SIZE)
        visible = (key[None, :] < context_len[:, None]) & seen[None, :]
        if WINDOWED:
            visible = visible & (key[None, :] >= lowest[:, None])
        acc, row_max, row_sum = _online_softmax_step(
            q, k, v, visible, acc, row_max, row_sum, scale, cap, CAPPED, ROUND, DOT
        )
    return acc, row_max, row_sum


@triton.jit
def _attend_tree(
    q, acc, row_max, row_sum, k_blocks, v_blocks, table, masks, live, max_tree_blocks, words, kv_head, scale, cap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Tree slots; `masks [M]` points to each row's words of 64 slots. BLOCK_N divides 64."""
    for first in range(0, words * 64, BLOCK_N):
        bits = tl.load(masks + first // 64, mask=live, other=0)
        if tl.max((bits != 0).to(tl.int32), 0) > 0:
            slot = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
            visible = ((bits[:, None] >> (slot % 64).to(tl.int64)[None, :]) & 1) != 0
            seen = tl.max(visible.to(tl.int32), 0) != 0
            held = slot // BLOCK_SIZE < max_tree_blocks
            kv_block = tl.load(table + slot // BLOCK_SIZE, mask=held, other=0)
            k, v = _load_block(
                k_blocks, v_blocks, kv_block, slot, kv_head, held, seen, KV_HEADS, D, BLOCK_D, BLOCK_SIZE
            )
            acc, row_max, row_sum = _online_softmax_step(
                q, k, v, visible, acc, row_max, row_sum, scale, cap, CAPPED, ROUND, DOT
            )
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=_VARYING,
    do_not_specialize_on_alignment=[
        "positions",
        "sequence_index",
        "context_lens",
        "block_tables",
        "tree_block_tables",
        "tree_mask",
        "tiles",
    ],
)
def attend_tiles(
    q, k_blocks, v_blocks, out, stats, positions, sequence_index, context_lens,
    block_tables, tree_block_tables, tree_mask, tiles, rows, max_blocks, max_tree_blocks, words, window, q_stride,
    scale, cap,
    KV_HEADS: tl.constexpr, QUERIES_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS, splits). `out`: the result `[n, H, D]`, or if SPLIT fp32 sums `[splits, n, H, D]`, before
    normalization, with their (maximum, divisor) in `stats [splits, n, H, 2]`. QUERIES_PER_KV query heads share
    a KV head."""
    kv_head = tl.program_id(1)
    split, splits = tl.program_id(2), tl.num_programs(2)
    ROUND: tl.constexpr = q.dtype.element_ty
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    count = tl.load(tiles)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        first = tl.load(tiles + 1 + tile)
        row = first + m // QUERIES_PER_KV
        live = row < tl.load(tiles + 2 + tile)
        item = (
            row.to(tl.int64) * (KV_HEADS * QUERIES_PER_KV) + kv_head * QUERIES_PER_KV + m % QUERIES_PER_KV
        )  # of [n, H]
        start = row.to(tl.int64) * q_stride + (kv_head * QUERIES_PER_KV + m % QUERIES_PER_KV) * D
        inside = live[:, None] & (d < D)[None, :]
        query = tl.load(q + start[:, None] + d[None, :], mask=inside, other=0.0).to(DOT)
        owner = tl.load(sequence_index + first).to(tl.int64)
        context_len = tl.load(context_lens + row, mask=live, other=0)
        end = tl.max(context_len, 0)
        lowest = context_len * 0
        begin = end * 0
        if WINDOWED:
            position = tl.load(positions + row, mask=live, other=0x7FFFFFFF).to(tl.int32)
            lowest = tl.maximum(position - window + 1, 0)
            begin = tl.min(lowest, 0) // BLOCK_N * BLOCK_N
        keys_per_split = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), splits), BLOCK_N) * BLOCK_N
        begin = begin + split * keys_per_split
        end = tl.minimum(begin + keys_per_split, end)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc, row_max, row_sum = _attend_context(
            query, acc, row_max, row_sum, k_blocks, v_blocks, block_tables + owner * max_blocks, context_len, lowest,
            begin, end, kv_head, scale, cap, KV_HEADS, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, WINDOWED, CAPPED, ROUND, DOT,
        )  # fmt: skip
        if split == splits - 1:
            acc, row_max, row_sum = _attend_tree(
                query, acc, row_max, row_sum, k_blocks, v_blocks, tree_block_tables + owner * max_tree_blocks,
                tree_mask + row.to(tl.int64) * words, live, max_tree_blocks, words, kv_head,
                scale, cap, KV_HEADS, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, CAPPED, ROUND, DOT,
            )  # fmt: skip
        if SPLIT:
            item += split * rows.to(tl.int64) * (KV_HEADS * QUERIES_PER_KV)
            tl.store(stats + item * 2, row_max, mask=live)
            tl.store(stats + item * 2 + 1, row_sum, mask=live)
        else:
            acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        tl.store(out + item[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["items"])
def merge_splits(sums, stats, out, items, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """Online softmax over splits: `sums [SPLITS, items, D]`, `stats [SPLITS, items, 2]` -> `out [items, D]`.

    One program per item (one head of one row). SPLITS is a power of two."""
    item = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    place = tl.arange(0, SPLITS) * items.to(tl.int64) + item
    row_max = tl.load(stats + place * 2)
    row_sum = tl.load(stats + place * 2 + 1)
    best = tl.max(row_max, 0)
    weights = tl.exp2(row_max - tl.where(best == float("-inf"), 0.0, best))
    part = tl.load(sums + place[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    divisor = tl.sum(row_sum * weights, 0)
    mixed = tl.sum(part * weights[:, None], 0) / tl.where(divisor > 0, divisor, 1.0)
    tl.store(out + item * D + d, mixed.to(out.dtype.element_ty), mask=d < D)
