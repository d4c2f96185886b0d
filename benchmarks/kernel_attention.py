"""The attention op beside torch's: SDPA with a dense mask, SDPA split and merged, FlexAttention; and memory's bound."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from kernel_timing import Timed, binary_tree, in_turn, measure, table, tree_plan, wall

from swarm_kernels.batch import BLOCK_SIZE
from swarm_kernels.ops import dispatch

CONTEXTS = (256, 1024, 4096, 16384)
TREES = (1, 4, 16, 64)
SHAPES = ((9, 3, 64), (32, 8, 128))  # heads, key heads, head size: SmolLM2's and Llama 3's
COLD_BYTES = 160 << 20  # keys and values to go through before any is read again: more than the caches hold
DTYPE = torch.bfloat16
Keys = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    heads: int
    groups: int
    dim: int
    context: int
    rows: int

    @property
    def keys(self) -> int:
        return self.context + self.rows

    @property
    def nbytes(self) -> int:
        return 2 * self.keys * self.groups * self.dim * DTYPE.itemsize

    @property
    def copies(self) -> int:
        return max(2, -(-COLD_BYTES // self.nbytes))


def ours(case: Case) -> Callable[[], object]:
    plan, blocks = tree_plan(case.context, case.rows)
    q = torch.randn(case.rows, case.heads, case.dim)
    k, v = torch.randn(2, case.rows, case.groups, case.dim).unbind()

    def one() -> Callable[[], object]:
        k_blocks = torch.randn(blocks, case.groups, case.dim, BLOCK_SIZE).to(DTYPE)
        v_blocks = torch.randn(blocks, case.groups, BLOCK_SIZE, case.dim).to(DTYPE)
        return lambda: dispatch.attend(q, k, v, k_blocks, v_blocks, plan, case.dim**-0.5)

    return in_turn([one() for _ in range(case.copies)])


def _caches(case: Case) -> list[Keys]:
    shape = (1, case.groups, case.keys, case.dim)
    return [(torch.randn(shape).to(DTYPE), torch.randn(shape).to(DTYPE)) for _ in range(case.copies)]


def _folded_queries(case: Case) -> torch.Tensor:
    """`[1, G, share * rows, D]`: heads that share keys as more rows, so torch need not repeat the keys."""
    return torch.randn(1, case.groups, case.heads // case.groups * case.rows, case.dim).to(DTYPE)


def _folded_tree(case: Case) -> torch.Tensor:
    return binary_tree(case.rows).repeat(case.heads // case.groups, 1)


def _mask(tree: torch.Tensor, context: int) -> torch.Tensor:
    return torch.cat((torch.ones(tree.shape[0], context, dtype=torch.bool), tree), 1)


def sdpa(case: Case, caches: list[Keys]) -> Callable[[], object]:
    """As models call it."""
    q, mask = torch.randn(1, case.heads, case.rows, case.dim).to(DTYPE), _mask(binary_tree(case.rows), case.context)
    return in_turn([partial(F.scaled_dot_product_attention, q, k, v, mask, enable_gqa=True) for k, v in caches])


def sdpa_folded(case: Case, caches: list[Keys]) -> Callable[[], object]:
    q, tree = _folded_queries(case), _folded_tree(case)
    mask = _mask(tree, case.context)
    return in_turn([partial(F.scaled_dot_product_attention, q, k, v, mask) for k, v in caches])


def sdpa_split(case: Case, caches: list[Keys]) -> Callable[[], object]:
    """The dense past without a mask and the tree with one, merged by their log-sum-exps."""
    q = _folded_queries(case)
    mask = torch.zeros(q.shape[2], case.rows).masked_fill(~_folded_tree(case), float("-inf")).to(DTYPE)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def merged(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        past, past_lse = flash(q, k[:, :, : case.context], v[:, :, : case.context])
        tree, tree_lse = flash(q, k[:, :, case.context :], v[:, :, case.context :], attn_mask=mask)
        share = torch.sigmoid(past_lse - tree_lse)[..., None].to(DTYPE)
        return torch.lerp(tree, past, share)

    return in_turn([partial(merged, k, v) for k, v in caches])


def flex(case: Case, caches: list[Keys]) -> Callable[[], object]:
    """FlexAttention, compiled for this shape. Raises RuntimeError where inductor cannot compile."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn(1, case.heads, case.rows, case.dim).to(DTYPE)
    sees, context = binary_tree(case.rows), case.context

    def visible(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key < context) | sees[row, (key - context).clamp(min=0)]

    mask = create_block_mask(visible, None, None, case.rows, case.keys, device="cpu")
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    works = [partial(compiled, q, k, v, block_mask=mask, enable_gqa=True) for k, v in caches]
    works[0]()
    return in_turn(works)


def bench(seconds: float, gb_s: float, with_flex: bool) -> tuple[str, list[str]]:
    """-> (table, what misses the targets): microseconds a call, keys and values not in any cache.

    The least times, not the medians: on a machine at work torch's threads wait for each other longer than ours, and a
    comparison of medians would flatter us.
    """
    logging.getLogger("torch._inductor").setLevel(logging.CRITICAL)
    rows, missed = [], []
    for shape in SHAPES:
        for context in CONTEXTS:
            for tree in TREES:
                case = Case(*shape, context, tree)
                us = _measure(case, seconds, with_flex)
                best = min(OTHERS, key=lambda name: us.get(name, float("inf")))
                bound_us = case.nbytes / gb_s / 1e3
                gain, usual, over = us[best] / us["ours"], us["SDPA"] / us["ours"], us["ours"] / bound_us
                times = (f"{us[n]:.0f}" if n in us else "-" for n in ("ours", *OTHERS))
                name = f"{shape[0]}/{shape[1]} x {shape[2]}, {context}, {tree}"
                rows.append(f"{name} | {' | '.join(times)} | {bound_us:.0f} | {usual:.1f} | {gain:.1f} | {over:.1f}")
                if gain < 2:
                    missed.append(f"{name}: {gain:.2f} times as fast as {best}, not 2")
                if tree == 1 and context >= 4096 and over > 2:
                    missed.append(f"{name}: {over:.2f} times the bound, not 2")
    header = " | ".join(
        ("heads, context, tree", "ours", *OTHERS, "bound", "SDPA / ours", "best of torch / ours", "ours / bound")
    )
    return table(header, rows), missed


OTHERS = ("SDPA", "SDPA, folded", "SDPA, folded and split", "FlexAttention")


def _measure(case: Case, seconds: float, with_flex: bool) -> dict[str, float]:
    """The least microseconds a call, by work."""
    caches = _caches(case)
    works: dict[str, Timed] = {
        "ours": wall(ours(case)),
        "SDPA": wall(sdpa(case, caches)),
        "SDPA, folded": wall(sdpa_folded(case, caches)),
        "SDPA, folded and split": wall(sdpa_split(case, caches)),
    }
    if with_flex:
        works["FlexAttention"] = wall(flex(case, caches))
    return {name: 1e3 * min(ms) for name, ms in measure(seconds, works).ms.items()}
