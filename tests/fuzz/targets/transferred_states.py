"""A recurrent state that another node sends in a KV transfer: a state of the right shapes, or InvalidRequest."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swarm.errors import InvalidRequest
from swarm_kernels.kvcache.layer_transfer import IncomingState, packed, unpack
from swarm_kernels.kvcache.recurrent_states import MAX_ROWS, Segment
from swarm_kernels.kvcache.state_plan import RowInput, StateSnapshot
from swarm_kernels.kvcache.stateful_cache import StateSpec, TensorSpec

INSTRUMENT = ("swarm_kernels.kvcache.layer_transfer",)
_TOKENS, _LAYERS = 40, (2, 3)
_SPEC = StateSpec(
    {"conv": TensorSpec((2, 3), torch.bfloat16), "recurrent": TensorSpec((2, 2), torch.float32)},
    TensorSpec((4,), torch.bfloat16),
)


def run(data: bytes) -> None:
    """`data`: where the units go, in its first two bytes, then a state for each of two layers."""
    segments: list[Segment] = []
    half = len(data) // 2
    for layer, part in zip(_LAYERS, (data[2:half], data[half:]), strict=True):
        incoming = IncomingState(_SPEC)
        first = int.from_bytes(data[:2], "little", signed=True) // 256
        try:
            if not incoming.add(first, part.ljust(len(incoming.body), b"\0")):
                return
            unpack(_SPEC, layer, incoming.body, _TOKENS, segments)
        except InvalidRequest:
            return
    (segment,) = segments
    assert len(segment.rows) <= MAX_ROWS
    assert segment.end == _TOKENS
    for layer in _LAYERS:
        state = segment.start.layers[layer]
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {"conv": (2, 3), "recurrent": (2, 2)}
        assert all(row.layers[layer].shape == (4,) for row in segment.rows)


def seeds() -> Iterator[bytes]:
    for count in (0, 3):
        rows = [RowInput({2: torch.ones(4, dtype=torch.bfloat16)}) for _ in range(count)]
        state = {"conv": torch.ones(2, 3, dtype=torch.bfloat16), "recurrent": torch.ones(2, 2)}
        body = packed(_SPEC, 2, Segment(StateSnapshot(_TOKENS - count, {2: state}), rows))[:900]
        yield bytes(2) + body + bytes(2) + body
