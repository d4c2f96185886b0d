"""Bodies of expert messages: rows and which experts they are for, and outputs. Written here and checked here.

Owns the layout and every bound that depends on the model; `swarm.expert_messages` has those of headers.
"""

from __future__ import annotations

import torch

from swarm.codec import Buffer
from swarm.errors import ProtocolError
from swarm.expert_messages import MAX_EXPERT_ROWS, MAX_PAIRS, ExpertRows
from swarm_kernels.runtime.hidden_codec import from_wire, to_wire, wire_bytes

_PAIR_BYTES = 4  # two unsigned little-endian numbers of 16 bits
OUTPUT = torch.float32


def pairs_of_frame(hidden: int, reply_bytes: int) -> int:
    """How many outputs make a reply of about so many bytes."""
    return max(1, min(MAX_PAIRS, MAX_EXPERT_ROWS, reply_bytes // (hidden * OUTPUT.itemsize)))


def rows_to_wire(x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor, dtype: torch.dtype) -> bytes:
    """The body of an ExpertRows: `x [n, hidden]` in `dtype`, then `rows [pairs]` and `experts [pairs]`."""
    pairs = torch.stack((rows, experts), 1).to(torch.uint16).contiguous()
    return bytes(to_wire(x, dtype)) + pairs.view(torch.uint8).numpy().tobytes()


def rows_from_wire(
    message: ExpertRows, body: Buffer, hidden: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (`x [n, hidden]` fp32, `rows [pairs]`, `experts [pairs]`, int64 both). Raises ProtocolError."""
    view = memoryview(body)
    size = wire_bytes(message.rows, hidden, dtype)
    if view.nbytes != size + _PAIR_BYTES * message.pairs:
        raise ProtocolError(
            f"{message.rows} rows and {message.pairs} pairs take {size + _PAIR_BYTES * message.pairs} bytes, "
            f"{view.nbytes} arrived"
        )
    pairs = torch.frombuffer(bytearray(view[size:]), dtype=torch.uint16).to(torch.int64).view(-1, 2)
    if int(pairs[:, 0].max()) >= message.rows:
        raise ProtocolError(f"an output was asked for of a row that is none of the {message.rows}")
    return from_wire(view[:size], message.rows, hidden, dtype).float(), pairs[:, 0], pairs[:, 1]


def outputs_to_wire(outputs: torch.Tensor) -> memoryview:
    return to_wire(outputs, OUTPUT)


def outputs_from_wire(body: Buffer, pairs: int, hidden: int) -> torch.Tensor:
    """`[pairs, hidden]` fp32. Raises ProtocolError."""
    return from_wire(body, pairs, hidden, OUTPUT)
