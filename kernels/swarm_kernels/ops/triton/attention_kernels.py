"""Paged tree attention as Triton kernels: tiles of rows, splits of the context, and the merge of splits.

A program takes one tile (consecutive rows of one session, with all query heads that share a KV head) and one split of
the context; the last split also takes the tree. Scores are kept in base 2. Offsets into the pages are int64: a pool may
hold more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROW_FACTS = ["rows", "max_pages", "max_tree_pages", "words", "window", "q_stride"]  # change from batch to batch


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["session", "tiles"])
def cut_tiles(session, tiles, rows, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """`tiles[0]`: how many; `tiles[1 + t]`: first row of tile t; after the last one, `rows`. One program.

    A tile begins where the session changes and at every multiple of TILE rows.
    """
    done = 0
    for base in range(0, rows, BLOCK):
        row = base + tl.arange(0, BLOCK)
        here = row < rows
        own = tl.load(session + row, mask=here, other=-1)
        before = tl.load(session + row - 1, mask=here & (row > 0), other=-1)
        first = here & ((own != before) | (row % TILE == 0))
        count = first.to(tl.int32)
        tl.store(tiles + done + tl.cumsum(count, 0), row, mask=first)
        done += tl.sum(count, 0)
    tl.store(tiles, done)
    tl.store(tiles + 1 + done, rows)


@triton.jit
def _tanh(x):
    shrunk = tl.exp2(tl.abs(x) * -2.885390081777927)  # exp(-2 |x|): never overflows
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _fold(q, k, v, visible, acc, top, total, scale, cap, CAPPED: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr):
    """One block of keys into the running softmax: `q [M, D]`, `k [D, N]`, `v [N, D]`, `visible [M, N]`."""
    scores = tl.dot(q, k.to(DOT), input_precision="ieee") * scale
    if CAPPED:
        scores = _tanh(scores) * cap
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: no infinity minus infinity
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None] + tl.dot(weights.to(ROUND).to(DOT), v.to(DOT), input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _load_block(
    k_pages, v_pages, page, slot, group, near, seen,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Keys `[D, N]` and values `[N, D]` of `slot [N]`, a multiple of PAGE and those after it, in pages `page [N]`.

    `near [N]` must be the same for all slots of a page, or the loads of keys fall apart into single elements; values
    are read where `seen [N]`, because what nobody sees may be an infinity, and zero times infinity is not zero.
    """
    d = tl.arange(0, BLOCK_D)
    head = page.to(tl.int64) * (GROUPS * D * PAGE) + group * (D * PAGE)
    offset = slot % PAGE
    k_base = tl.max_contiguous(tl.multiple_of(head + offset, [PAGE]), [PAGE])
    k = tl.load(k_pages + k_base[None, :] + (d * PAGE)[:, None], mask=near[None, :] & (d < D)[:, None], other=0.0)
    v = tl.load(v_pages + (head + offset * D)[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
    return k, v


@triton.jit
def _fold_past(
    q, acc, top, total, k_pages, v_pages, table, past, lowest, begin, end, group, scale, cap,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Committed keys `[begin, end)` of one session; row m sees `[lowest[m], past[m])` of them."""
    for first in range(begin, end, BLOCK_N):
        key = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
        near = (key // PAGE) * PAGE < end
        seen = key < end
        page = tl.load(table + key // PAGE, mask=near, other=0)
        k, v = _load_block(k_pages, v_pages, page, key, group, near, seen, GROUPS, D, BLOCK_D, PAGE)
        visible = (key[None, :] < past[:, None]) & seen[None, :]
        if WINDOWED:
            visible = visible & (key[None, :] >= lowest[:, None])
        acc, top, total = _fold(q, k, v, visible, acc, top, total, scale, cap, CAPPED, ROUND, DOT)
    return acc, top, total


@triton.jit
def _fold_tree(
    q, acc, top, total, k_pages, v_pages, table, masks, live, max_tree_pages, words, group, scale, cap,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, ROUND: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Tree slots; `masks [M]` points to each row's words of 64 slots. BLOCK_N divides 64."""
    for first in range(0, words * 64, BLOCK_N):
        bits = tl.load(masks + first // 64, mask=live, other=0)
        if tl.max((bits != 0).to(tl.int32), 0) > 0:
            slot = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
            visible = ((bits[:, None] >> (slot % 64).to(tl.int64)[None, :]) & 1) != 0
            seen = tl.max(visible.to(tl.int32), 0) != 0
            held = slot // PAGE < max_tree_pages
            page = tl.load(table + slot // PAGE, mask=held, other=0)
            k, v = _load_block(k_pages, v_pages, page, slot, group, held, seen, GROUPS, D, BLOCK_D, PAGE)
            acc, top, total = _fold(q, k, v, visible, acc, top, total, scale, cap, CAPPED, ROUND, DOT)
    return acc, top, total


@triton.jit(
    do_not_specialize=_ROW_FACTS,
    do_not_specialize_on_alignment=["positions", "session", "past", "pages", "tree_pages", "tree_mask", "tiles"],
)
def attend_tiles(
    q, k_pages, v_pages, out, stats, positions, session, past, pages, tree_pages, tree_mask, tiles,
    rows, max_pages, max_tree_pages, words, window, q_stride, scale, cap,
    GROUPS: tl.constexpr, JOINT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, GROUPS, splits). `out`: the result `[n, H, D]`, or if SPLIT fp32 sums `[splits, n, H, D]`, not yet
    divided, with their (maximum, divisor) in `stats [splits, n, H, 2]`. JOINT query heads share a KV head."""
    group = tl.program_id(1)
    split, splits = tl.program_id(2), tl.num_programs(2)
    ROUND: tl.constexpr = q.dtype.element_ty
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    count = tl.load(tiles)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        first = tl.load(tiles + 1 + tile)
        row = first + m // JOINT
        live = row < tl.load(tiles + 2 + tile)
        item = row.to(tl.int64) * (GROUPS * JOINT) + group * JOINT + m % JOINT  # of [n, H]
        start = row.to(tl.int64) * q_stride + (group * JOINT + m % JOINT) * D
        inside = live[:, None] & (d < D)[None, :]
        query = tl.load(q + start[:, None] + d[None, :], mask=inside, other=0.0).to(DOT)
        owner = tl.load(session + first).to(tl.int64)
        limit = tl.load(past + row, mask=live, other=0)
        end = tl.max(limit, 0)
        lowest = limit * 0
        begin = end * 0
        if WINDOWED:
            position = tl.load(positions + row, mask=live, other=0x7FFFFFFF).to(tl.int32)
            lowest = tl.maximum(position - window + 1, 0)
            begin = tl.min(lowest, 0) // BLOCK_N * BLOCK_N
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), splits), BLOCK_N) * BLOCK_N
        begin = begin + split * share
        end = tl.minimum(begin + share, end)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc, top, total = _fold_past(
            query, acc, top, total, k_pages, v_pages, pages + owner * max_pages, limit, lowest, begin, end, group,
            scale, cap, GROUPS, D, BLOCK_D, BLOCK_N, PAGE, WINDOWED, CAPPED, ROUND, DOT,
        )  # fmt: skip
        if split == splits - 1:
            acc, top, total = _fold_tree(
                query, acc, top, total, k_pages, v_pages, tree_pages + owner * max_tree_pages,
                tree_mask + row.to(tl.int64) * words, live, max_tree_pages, words, group,
                scale, cap, GROUPS, D, BLOCK_D, BLOCK_N, PAGE, CAPPED, ROUND, DOT,
            )  # fmt: skip
        if SPLIT:
            item += split * rows.to(tl.int64) * (GROUPS * JOINT)
            tl.store(stats + item * 2, top, mask=live)
            tl.store(stats + item * 2 + 1, total, mask=live)
        else:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + item[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["items"])
def merge_splits(sums, stats, out, items, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """Online softmax over splits: `sums [SPLITS, items, D]`, `stats [SPLITS, items, 2]` -> `out [items, D]`.

    One program an item, a head of a row. SPLITS is a power of two."""
    item = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    place = tl.arange(0, SPLITS) * items.to(tl.int64) + item
    top = tl.load(stats + place * 2)
    total = tl.load(stats + place * 2 + 1)
    best = tl.max(top, 0)
    weights = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    part = tl.load(sums + place[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    divisor = tl.sum(total * weights, 0)
    mixed = tl.sum(part * weights[:, None], 0) / tl.where(divisor > 0, divisor, 1.0)
    tl.store(out + item * D + d, mixed.to(out.dtype.element_ty), mask=d < D)
