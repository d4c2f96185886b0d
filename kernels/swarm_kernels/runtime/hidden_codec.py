"""Rows between layers as bytes: `[rows, width]`, row-major, little-endian, in the session's dtype, nothing else.

Owns that layout and the check of its length; frames and sessions belong to others.
"""

from __future__ import annotations

import torch

from swarm.errors import ProtocolError
from swarm_kernels.device.transfer import to_host


def wire_bytes(rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Length of a body of `rows` hidden states."""
    return rows * hidden_size * dtype.itemsize


def to_wire(hidden: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """`hidden [n, hidden]` of any float dtype and device -> its bytes in `dtype`. Copies only if a conversion is
    needed.

    Without a conversion the bytes share memory with `hidden`: send them before it changes.
    """
    flat = to_host(hidden.detach(), dtype).contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def from_wire(body: bytes | bytearray | memoryview, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A body -> `[rows, hidden]` of `dtype` on the CPU; shares memory with a writable body. Raises ProtocolError."""
    view = memoryview(body)
    expected = wire_bytes(rows, hidden_size, dtype)
    if view.nbytes != expected:
        raise ProtocolError(f"a body of {rows} hidden states takes {expected} bytes, {view.nbytes} arrived")
    if rows == 0:
        return torch.empty(0, hidden_size, dtype=dtype)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=dtype).view(rows, hidden_size)
