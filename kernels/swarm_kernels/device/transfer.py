"""Tensors between the host and a GPU without making either wait: through pinned memory, in as few transfers as can be.

On the CPU nothing is copied that need not be. Knows no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 16  # bytes: what the kernels' widest loads ask for


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` on `device`, as `dtype` if given. The host goes on meanwhile, and may change its source."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)  # the allocator keeps the pinned copy until then
    return tensor.to(device=device, dtype=dtype)


def to_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as `dtype` in host memory, complete. Itself if it is that already."""
    converted = tensor.to(dtype)
    if converted.device.type != "cuda":
        return converted.to("cpu")
    host = torch.empty(converted.shape, dtype=dtype, pin_memory=True)
    host.copy_(converted, non_blocking=True)
    torch.cuda.current_stream(converted.device).synchronize()
    return host


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, in one transfer; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return split(flatten(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def flatten(arrays: Sequence[npt.NDArray[Any]], pinned: bool) -> torch.Tensor:
    """All arrays behind one another in one buffer of bytes, each aligned."""
    flat = torch.empty(sum(_padded(array) for array in arrays), dtype=torch.uint8, pin_memory=pinned)
    target, at = flat.numpy(), 0
    for array in arrays:
        target[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _padded(array)
    return flat


def split(flat: torch.Tensor, like: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Views of `pack`'s buffer, with the dtypes and shapes of the arrays it was made of."""
    tensors, at = [], 0
    for array in like:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(flat[at : at + array.nbytes].view(dtype).view(array.shape))
        at += _padded(array)
    return tensors


def _padded(array: npt.NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGN) * _ALIGN
