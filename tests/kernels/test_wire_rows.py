"""Hidden states read with numpy are those that peers with torch read, and distances of them the same numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swarm.errors import ProtocolError, UsageError
from swarm_kernels.audit.row_distance import row_distance, wire_distance
from swarm_kernels.audit.wire_rows import row_bytes, rows_from_wire
from swarm_kernels.device.device import parse_dtype, state_dtype
from swarm_kernels.runtime.hidden_codec import from_wire, to_wire, wire_bytes

FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_are_those_of_the_torch_codec(dtype: str) -> None:
    generator = torch.Generator().manual_seed(3)
    states = state_dtype(parse_dtype(dtype))
    for rows, hidden in ((1, 1), (3, 64), (17, 576)):
        values = torch.randn(rows, hidden, generator=generator) * 1000
        values[0, 0] = math.inf
        values[-1, -1] = math.nan if rows > 1 else -0.0
        body = bytes(to_wire(values, states))
        expected = from_wire(body, rows, hidden, states).float().numpy()
        found = rows_from_wire(body, rows, hidden, dtype)
        assert found.dtype == np.float32
        assert found.tobytes() == expected.tobytes() or np.array_equal(found, expected, equal_nan=True)
        assert row_bytes(hidden, dtype) * rows == wire_bytes(rows, hidden, states) == len(body)
        one, other = (bytes(to_wire(row[None], states)) for row in (values[rows // 2], values[rows // 2] * 1.01))
        rows_read = [from_wire(row, 1, hidden, states)[0].float().numpy() for row in (one, other)]
        assert wire_distance(one, other, dtype, (hidden,)) == row_distance(*rows_read)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_body_of_another_length_is_refused(dtype: str) -> None:
    for size in (0, 1, row_bytes(8, dtype) - 1, row_bytes(8, dtype) + 1, row_bytes(8, dtype) * 2):
        with pytest.raises(ProtocolError, match="arrived"):
            rows_from_wire(bytes(size), 1, 8, dtype)
    assert wire_distance(bytes(4), bytes(8), dtype, (1,)) == math.inf


def test_a_format_that_nobody_has_is_refused() -> None:
    with pytest.raises(UsageError, match="not a number format"):
        rows_from_wire(bytes(4), 1, 1, "fp8")
