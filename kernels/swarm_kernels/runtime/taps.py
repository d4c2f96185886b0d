"""Taps (`swarm.tap_messages`): hidden states between layers, read out of a batch that runs, as bytes for a drafter.

Owns where a batch stops because somebody reads there, and the layout of the bytes: bf16, or 8 bits with a scale for
each group. Groups, because a few channels of a hidden state are hundreds of times as large as the rest: one scale a row
would leave nothing of the others. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import ProtocolError
from swarm.types import TAP_GROUP, tapped_row_bytes

_LARGEST = 127

StepTaps = tuple[tuple[int, bytes], ...]
"""(tap, its rows of one step), ascending."""


@dataclass(frozen=True, slots=True)
class TappedPart:
    """The rows `[start, end)` of a batch whose `layers` somebody wants in `bits`."""

    start: int
    end: int
    layers: Sequence[int]
    bits: int


class BatchTaps:
    """The taps of one batch. `collect` whenever a layer is about to run, and after the last one of the model."""

    def __init__(self, parts: Sequence[TappedPart | None]) -> None:
        """`parts`: one for each step of the batch."""
        self._wanted: dict[int, list[tuple[int, TappedPart]]] = {}  # by tap: the step and its rows
        self._rows: list[list[tuple[int, bytes]]] = [[] for _ in parts]
        for index, part in enumerate(parts):
            for layer in part.layers if part is not None and part.start < part.end else ():
                self._wanted.setdefault(layer, []).append((index, part))  # type: ignore[arg-type]  # it has layers

    def next_stop(self, layer: int, end: int) -> int:
        """Up to which layer, `end` at most, the batch may run on from `layer`."""
        return min((tap for tap in self._wanted if layer < tap < end), default=end)

    def collect(self, layer: int, hidden: torch.Tensor) -> None:
        """`hidden [rows, hidden]`: what `layer` reads."""
        for index, part in self._wanted.pop(layer, ()):
            self._rows[index].append((layer, encode(hidden[part.start : part.end], part.bits)))

    def of(self, step: int) -> StepTaps:
        """Those of one step."""
        return tuple(self._rows[step])


def encode(hidden: torch.Tensor, bits: int) -> bytes:
    """`[n, hidden]` of any float dtype and device -> n rows of `tapped_row_bytes(hidden, bits)` bytes."""
    rows = hidden.detach().to("cpu", torch.float32)
    if bits == 16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    n, width = rows.shape
    if not n:
        return b""
    groups = F.pad(rows, (0, -width % TAP_GROUP)).view(n, -(-width // TAP_GROUP), TAP_GROUP)
    scales = (groups.abs().amax(-1) / _LARGEST).to(torch.bfloat16)
    steps = scales.float().clamp_min(torch.finfo(torch.bfloat16).tiny)
    # a group with a number that is not finite has such a scale; its other numbers are of no account
    numbers = (groups / steps[..., None]).nan_to_num(0.0).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    parts = (scales.view(torch.uint8), numbers.flatten(1)[:, :width].contiguous().view(torch.uint8))
    return torch.cat(parts, 1).numpy().tobytes()


def decode(body: bytes | bytearray | memoryview, hidden_size: int, bits: int) -> torch.Tensor:
    """Rows as `encode` makes them -> fp32 `[n, hidden]`, not necessarily finite. Raises ProtocolError."""
    size = tapped_row_bytes(hidden_size, bits)
    if len(body) % size:
        raise ProtocolError(f"{len(body)} bytes are no rows of {size}")
    if not len(body):
        return torch.empty(0, hidden_size)
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, size)
    if bits == 16:
        return data.view(torch.bfloat16).float()
    scaled = size - hidden_size
    scales = data[:, :scaled].flatten().view(torch.bfloat16).view(len(data), -1).float()
    numbers = data[:, scaled:].view(torch.int8).float()
    return numbers * scales.repeat_interleave(TAP_GROUP, 1)[:, :hidden_size]
