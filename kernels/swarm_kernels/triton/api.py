"""What `ops` calls on a GPU whose kernels have passed their self-test: the same functions, under the same names."""

from __future__ import annotations

import torch

from swarm_kernels.batch import BatchPlan
from swarm_kernels.triton import attention, rows
from swarm_kernels.triton.graphs import stack_of

__all__ = ["attend", "covers", "move_slots", "rms_norm", "stack_of"]


def covers(heads: int, k_pages: torch.Tensor) -> bool:
    """Whether attention of `heads` query heads over these pages is compiled."""
    _, groups, dim, _ = k_pages.shape
    return attention.covers(attention.Heads(heads, groups, dim), k_pages.dtype)


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
    """See `ops.attend`."""
    with _on(q):
        return attention.attend(q, k, v, k_pages, v_pages, plan, scale, sliding_window, softcap)


def move_slots(k_pages: torch.Tensor, v_pages: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor) -> None:
    """See `ops.move_slots`."""
    with _on(k_pages):
        attention.move_slots(k_pages, v_pages, copy_from, copy_to)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    with _on(x):
        return rows.rms_norm(x, weight, eps)


def _on(tensor: torch.Tensor) -> torch.cuda.device:
    """Triton launches on the current GPU, which need not be the tensor's. Does nothing on a CPU."""
    return torch.cuda.device(tensor.get_device())
