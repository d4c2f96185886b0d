"""Hidden states to bytes and back."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import ProtocolError
from swarm_kernels.runtime.hidden_codec import from_wire, to_wire, wire_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype: torch.dtype) -> None:
    hidden = torch.randn(5, 7)
    body = to_wire(hidden, dtype)
    assert len(body) == wire_bytes(5, 7, dtype)
    for copy in (body, bytes(body), bytearray(body)):
        assert torch.equal(from_wire(copy, 5, 7, dtype), hidden.to(dtype))


def test_no_copy_where_none_is_needed() -> None:
    hidden = torch.randn(3, 4)
    assert from_wire(to_wire(hidden, torch.float32), 3, 4, torch.float32).data_ptr() == hidden.data_ptr()
    body = bytearray(to_wire(hidden, torch.bfloat16))
    back = from_wire(body, 3, 4, torch.bfloat16)
    body[:2] = b"\0\0"
    assert back[0, 0] == 0


def test_rows_of_a_larger_tensor_and_no_rows() -> None:
    hidden = torch.randn(6, 4)
    assert bytes(to_wire(hidden[::2], torch.float32)) == bytes(to_wire(hidden[::2].clone(), torch.float32))
    assert len(to_wire(hidden[:0], torch.bfloat16)) == 0
    assert from_wire(b"", 0, 4, torch.bfloat16).shape == (0, 4)


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_body_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="takes 16 bytes"):
        from_wire(bytes(size), 2, 4, torch.bfloat16)
