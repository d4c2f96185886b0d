"""Hidden states as they cross the wire, read with numpy: for peers that compute no layer and may have no torch.

Owns nothing: the layout is `runtime.hidden_codec`'s, whose `from_wire` is the same for peers that compute.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarm.errors import ProtocolError, UsageError

_STORED: dict[str, npt.DTypeLike] = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2", "int8": "<u2", "int4": "<u2"}
"""How hidden states are stored where nodes compute in that format: bf16, of which numpy knows the bits only, where its
weights are integers (`device.state_dtype`)."""


def row_bytes(hidden_size: int, dtype: str) -> int:
    """Of a row of hidden states where nodes compute in `dtype`. Raises UsageError."""
    return hidden_size * np.dtype(_stored(dtype)).itemsize


def rows_from_wire(
    body: bytes | bytearray | memoryview, rows: int, hidden_size: int, dtype: str
) -> npt.NDArray[np.float32]:
    """A body -> `[rows, hidden]`. `dtype`: that the nodes compute in. Raises ProtocolError, UsageError."""
    view, expected = memoryview(body), rows * row_bytes(hidden_size, dtype)
    if view.nbytes != expected:
        raise ProtocolError(f"a body of {rows} hidden states takes {expected} bytes, {view.nbytes} arrived")
    values = np.frombuffer(view, _stored(dtype)).reshape(rows, hidden_size)
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _stored(dtype: str) -> npt.DTypeLike:
    try:
        return _STORED[dtype]
    except KeyError:
        raise UsageError(f"'{dtype}' is not a number format; choose one of {', '.join(_STORED)}") from None
