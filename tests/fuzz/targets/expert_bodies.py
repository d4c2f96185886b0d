"""Bodies of messages about experts: rows and pairs of the sizes that their header says, or a ProtocolError."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swarm.errors import ProtocolError
from swarm.expert_messages import MAX_EXPERT_ROWS, MAX_PAIRS, ExpertRows
from swarm_hop.experts.rows import outputs_from_wire, outputs_to_wire, rows_from_wire, rows_to_wire

INSTRUMENT = ("swarm_hop.experts.rows",)
_HIDDEN = 3


def run(data: bytes) -> None:
    """`data`: numbers of rows and pairs and the format in its first four bytes, then a body."""
    rows = 1 + int.from_bytes(data[:1]) % MAX_EXPERT_ROWS
    pairs = 1 + int.from_bytes(data[1:3], "little") % MAX_PAIRS
    dtype = torch.bfloat16 if data[3:4] > b"\x7f" else torch.float32
    message, body = ExpertRows(1, 0, rows, pairs, "", ""), data[4:]
    try:
        x, of_rows, experts = rows_from_wire(message, body, _HIDDEN, dtype)
    except ProtocolError:
        pass
    else:
        assert x.shape == (rows, _HIDDEN)
        assert len(of_rows) == len(experts) == pairs
        assert 0 <= int(of_rows.min()) <= int(of_rows.max()) < rows
        assert 0 <= int(experts.min()) <= int(experts.max()) < 1 << 16
        assert rows_to_wire(x, of_rows, experts, dtype)[-4 * pairs :] == body[-4 * pairs :]
    try:
        outputs = outputs_from_wire(body, pairs, _HIDDEN)
    except ProtocolError:
        return
    assert bytes(outputs_to_wire(outputs)) == body


def seeds() -> Iterator[bytes]:
    for dtype, mark in ((torch.float32, b"\0"), (torch.bfloat16, b"\xff")):
        x = torch.arange(6.0).view(2, _HIDDEN)
        body = rows_to_wire(x, torch.tensor([0, 1, 1]), torch.tensor([5, 0, 383]), dtype)
        yield bytes([1]) + (2).to_bytes(2, "little") + mark + body
    yield bytes([0, 1, 0, 0]) + bytes(outputs_to_wire(torch.ones(2, _HIDDEN)))
