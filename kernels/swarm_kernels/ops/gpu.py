"""Which implementation runs a GPU's ops: the Triton kernels once they have proved themselves here, or plain torch.

Owns that choice, made once for each device, number format and head size, and its reason. Imports Triton only when a
GPU asks.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.backend import AttentionBackend

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
USUAL_HEAD_DIM = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The Triton kernels, or None and why not."""

    backend: AttentionBackend | None
    reason: str


_choices: dict[tuple[torch.device, torch.dtype, int], _Choice] = {}
_lock = threading.Lock()


def backend(device: torch.device, dtype: torch.dtype, head_dim: int = USUAL_HEAD_DIM) -> AttentionBackend | None:
    """The Triton kernels if they compute what the reference does on this GPU in this format and head size, else None.

    The first call for a device, format and head size compiles and tests, which takes seconds; the others look it up.
    None for every device that is no GPU. What a size needs that the kernels do not cover is theirs to say.
    """
    if device.type != "cuda" or dtype not in FORMATS:
        return None
    return _choose(device, dtype, head_dim).backend


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """What computes on a GPU, in words, with the reason if it is not our kernels."""
    choice = _choose(device, dtype, USUAL_HEAD_DIM)
    if choice.backend is None:
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
                if choice.backend is None:
                    logger.warning(
                        "%s computes heads of %d in plain torch, slowly: %s", device, head_dim, choice.reason
                    )
    return choice


def _try(device: torch.device, dtype: torch.dtype, head_dim: int) -> _Choice:
    try:
        from triton.errors import TritonError

        from swarm_kernels.ops.triton import backend as api
        from swarm_kernels.ops.triton import selftest
        from swarm_kernels.ops.triton.attention import MAX_HEAD_DIM
    except (ImportError, RuntimeError) as error:  # not installed, or it cannot be loaded
        return _Choice(None, f"Triton cannot be used: {_first_line(error)}")
    try:
        if head_dim <= MAX_HEAD_DIM:
            selftest.run(device, dtype, head_dim)
    except KernelError as error:
        return _Choice(None, str(error))
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:  # from compiler to launch
        return _Choice(None, f"the kernels do not run: {_first_line(error)}")
    return _Choice(api.TRITON, "")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
