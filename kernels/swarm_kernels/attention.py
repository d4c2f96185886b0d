"""The one attention op: its contract, the check of its plan, and its dispatch. Knows no model."""

from __future__ import annotations

import torch

from swarm_kernels import compiled, gpu, native, prepared, reference
from swarm_kernels.batch import BatchPlan
from swarm_kernels.checks import check_cache, check_plan, check_rows, check_slots


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of packed rows over paged keys and values: `q [n, H, D]`, `k` and `v` `[n, G, D]` -> `[n, H, D]`.

    First the plan's slot copies are carried out (`move_slots`; harmless if done already), then the rows' keys and
    values are written to their slots, then row i sees the first `past[i]` committed keys of its session and the tree
    slots of its mask. Rows that see nothing get zeros. H is a multiple of G.

    `k_pages [pages, G, D, PAGE]` and `v_pages [pages, G, PAGE, D]` change in place. `sliding_window` hides committed
    keys at distance >= window from the row's position; `softcap` is Gemma's cap * tanh(score / cap).
    Compiled, dense past and sparse tree are computed apart and merged by online softmax (Ghidorah, section III-B), so
    no mask over the context is built.
    """
    shape = check_rows(q, k, v, k_pages, v_pages, plan)
    pages, _, dim, _ = shape
    library = native.library() if prepared.covers_cache(k_pages, dim) else None
    if library is not None:
        cache = prepared.describe_cache(shape, k_pages, v_pages)
        return compiled.attend(library, q, k, v, cache, plan, scale, sliding_window, softcap)
    check_plan(plan, pages)
    kernels = gpu.kernels(q.device, q.dtype, dim)
    if kernels is not None and kernels.covers(q.shape[1], k_pages):
        return kernels.attend(q, k, v, k_pages, v_pages, plan, scale, sliding_window, softcap)
    return reference.attend(q, k, v, k_pages, v_pages, plan, scale, sliding_window, softcap)


def move_slots(k_pages: torch.Tensor, v_pages: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor) -> None:
    """Commit tree slots of one layer: copy keys and values at flat slots `copy_from [m]` to `copy_to [m]`, in place."""
    shape = check_cache(k_pages, v_pages)
    pages, _, dim, _ = shape
    check_slots(copy_from, copy_to, pages)
    library = native.library() if prepared.covers_cache(k_pages, dim) else None
    if library is not None:
        compiled.move_slots(library, prepared.describe_cache(shape, k_pages, v_pages), copy_from, copy_to)
        return
    kernels = gpu.kernels(k_pages.device, k_pages.dtype, dim)
    if kernels is not None:
        kernels.move_slots(k_pages, v_pages, copy_from, copy_to)
    else:
        reference.move_slots(k_pages, v_pages, copy_from, copy_to)
