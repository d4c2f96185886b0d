"""Selects the backend of a GPU: the Triton kernels once they pass their self-test on it, else plain torch.

Owns the selection, made once for each device, dtype and head size, and its reason. Triton is imported lazily: it may be
missing, and CPU-only processes never need it.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.backend import AttentionBackend

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT_HEAD_DIM = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Selection:
    """The Triton backend, or None and the reason."""

    backend: AttentionBackend | None
    reason: str


_selections: dict[tuple[torch.device, torch.dtype, int], _Selection] = {}
_lock = threading.Lock()


def backend(device: torch.device, dtype: torch.dtype, head_dim: int = DEFAULT_HEAD_DIM) -> AttentionBackend | None:
    """The Triton backend if it matches the reference on this GPU with this dtype and head size, else None.

    The first call for a device, dtype and head size compiles and tests, which takes seconds; later calls look it up.
    None for every device that is not a GPU. Shapes are checked by the backend's own `supports_*` methods.
    """
    if device.type != "cuda" or dtype not in SUPPORTED_DTYPES:
        return None
    return _select(device, dtype, head_dim).backend


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """The selected GPU backend as text, with the reason if it is not the Triton kernels."""
    selection = _select(device, dtype, DEFAULT_HEAD_DIM)
    if selection.backend is None:
        return f"plain torch: {selection.reason}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"Triton kernels (sm_{major}{minor})"


def _select(device: torch.device, dtype: torch.dtype, head_dim: int) -> _Selection:
    key = (device, dtype, head_dim)
    selection = _selections.get(key)
    if selection is None:
        with _lock:
            selection = _selections.get(key)
            if selection is None:
                selection = _selections[key] = _load_and_test(device, dtype, head_dim)
                if selection.backend is None:
                    logger.warning(
                        "%s computes heads of %d in plain torch, slowly: %s", device, head_dim, selection.reason
                    )
    return selection


def _load_and_test(device: torch.device, dtype: torch.dtype, head_dim: int) -> _Selection:
    try:
        from triton.errors import TritonError

        from swarm_kernels.ops.triton import selftest
        from swarm_kernels.ops.triton.attention import MAX_HEAD_DIM
        from swarm_kernels.ops.triton.backend import TRITON
    except (ImportError, RuntimeError) as error:  # not installed, or it cannot be loaded
        return _Selection(None, f"Triton cannot be used: {_first_line(error)}")
    try:
        if head_dim <= MAX_HEAD_DIM:
            selftest.run(device, dtype, head_dim)
    except KernelError as error:
        return _Selection(None, str(error))
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:  # from compiler to launch
        return _Selection(None, f"the kernels do not run: {_first_line(error)}")
    return _Selection(TRITON, "")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
