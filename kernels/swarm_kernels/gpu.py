"""Which implementation runs a GPU's ops: the Triton kernels once they have proved themselves here, or plain torch.

Owns that choice, made once for each device, number format and head size, and its reason. Imports Triton only when a
GPU asks.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm.errors import KernelError
from swarm_kernels.batch import BatchPlan
from swarm_kernels.reference import LayerWeights

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
USUAL_HEAD_DIM = 64

logger = logging.getLogger(__name__)


class GpuStack(Protocol):
    """Layers and their caches, checked, that run as one."""

    pages: int  # of the smallest cache
    width: int
    head_dim: int

    def run(
        self,
        hidden: torch.Tensor,
        layers: Sequence[LayerWeights],
        cos: torch.Tensor,
        sin: torch.Tensor,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        plan: BatchPlan,
    ) -> torch.Tensor:
        """See `ops.decoder_layers`; layers and caches are those of the stack."""
        ...


class Kernels(Protocol):
    """What `swarm_kernels.triton.api` offers; the ops are those of `ops`, for what is covered."""

    def covers(self, heads: int, k_pages: torch.Tensor) -> bool: ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        plan: BatchPlan,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...

    def move_slots(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor
    ) -> None: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def stack_of(
        self,
        layers: Sequence[LayerWeights],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
    ) -> GpuStack | None:
        """None if a layer is not covered. Raises KernelError if the layers do not fit each other or their caches."""
        ...


@dataclass(frozen=True, slots=True)
class _Choice:
    """The kernels, or None and why not."""

    kernels: Kernels | None
    reason: str


_choices: dict[tuple[torch.device, torch.dtype, int], _Choice] = {}
_lock = threading.Lock()


def kernels(device: torch.device, dtype: torch.dtype, head_dim: int = USUAL_HEAD_DIM) -> Kernels | None:
    """The Triton kernels if they compute what the reference does on this GPU in this format and head size, else None.

    The first call for a device, format and head size compiles and tests, which takes seconds; the others look it up.
    None for every device that is no GPU. What a size needs that the kernels do not cover is theirs to say.
    """
    if device.type != "cuda" or dtype not in FORMATS:
        return None
    return _choose(device, dtype, head_dim).kernels


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """What computes on a GPU, in words, with the reason if it is not our kernels."""
    choice = _choose(device, dtype, USUAL_HEAD_DIM)
    if choice.kernels is None:
        return f"plain torch: {choice.reason}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"Triton kernels (sm_{major}{minor})"


def _choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> _Choice:
    key = (device, dtype, head_dim)
    choice = _choices.get(key)
    if choice is None:
        with _lock:
            choice = _choices.get(key)
            if choice is None:
                choice = _choices[key] = _try(device, dtype, head_dim)
                if choice.kernels is None:
                    logger.warning(
                        "%s computes heads of %d in plain torch, slowly: %s", device, head_dim, choice.reason
                    )
    return choice


def _try(device: torch.device, dtype: torch.dtype, head_dim: int) -> _Choice:
    try:
        from triton.errors import TritonError

        from swarm_kernels.triton import api, selftest
        from swarm_kernels.triton.attention import MAX_HEAD_DIM
    except (ImportError, RuntimeError) as error:  # not installed, or it cannot be loaded
        return _Choice(None, f"Triton cannot be used: {_first_line(error)}")
    try:
        if head_dim <= MAX_HEAD_DIM:
            selftest.run(device, dtype, head_dim)
    except KernelError as error:
        return _Choice(None, str(error))
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:  # from compiler to launch
        return _Choice(None, f"the kernels do not run: {_first_line(error)}")
    return _Choice(api, "")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
