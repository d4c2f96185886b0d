"""Asynchronous transfers between host and GPU: through pinned memory, in as few copies as possible.

On the CPU nothing is copied without need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 16  # bytes: alignment of the kernels' widest loads


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` on `device`, as `dtype` if given. Does not block; the host may change the source at once."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)  # the allocator keeps the pinned copy until then
    return tensor.to(device=device, dtype=dtype)


def to_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as `dtype` in host memory, complete. The same tensor if nothing changes."""
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
    """All arrays concatenated in one byte buffer, each aligned."""
    flat = torch.empty(sum(_padded(array) for array in arrays), dtype=torch.uint8, pin_memory=pinned)
    target, offset = flat.numpy(), 0
    for array in arrays:
        target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += _padded(array)
    return flat


def split(flat: torch.Tensor, like: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Views into a buffer of `flatten`, with the dtypes and shapes of the arrays `like`."""
    tensors, offset = [], 0
    for array in like:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(flat[offset : offset + array.nbytes].view(dtype).view(array.shape))
        offset += _padded(array)
    return tensors


def _padded(array: npt.NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGN) * _ALIGN
