"""Taps on their way along the chain: taken apart as they come, joined with this hop's own, and read as rows.

Owns the layout of `CarriedTaps` bodies. All taps have the rows of the step's last rows; what lacks somewhere is missing
for all. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.codec import Buffer
from swarm.errors import ProtocolError
from swarm.types import MAX_TAPS, LayerSpan, TappedRow
from swarm_kernels.runtime.taps import StepTaps

MAX_STEPS = 64  # of one session whose taps wait for them
MAX_BYTES = 64 << 20


class CarriedBuffer:
    """Taps that came before their steps, of one session: the newest, within bounds."""

    def __init__(self) -> None:
        self._steps: dict[int, StepTaps] = {}

    def __len__(self) -> int:
        """Steps."""
        return len(self._steps)

    def keep(self, step: int, taps: StepTaps) -> None:
        self._steps[step] = taps
        while len(self._steps) > MAX_STEPS or self._size() > MAX_BYTES:
            del self._steps[min(self._steps)]

    def take(self, step: int) -> StepTaps:
        """Those of a step, () if none came. Older ones are forgotten."""
        came = self._steps.get(step, ())
        self._steps = {other: taps for other, taps in self._steps.items() if other > step}
        return came

    def _size(self) -> int:
        return sum(len(rows) for taps in self._steps.values() for _, rows in taps)


def taken_apart(layers: Sequence[int], body: Buffer, row_bytes: int, span: LayerSpan) -> StepTaps:
    """The taps that came from the hops before the one with `span`. Raises ProtocolError for other ones."""
    if list(layers) != sorted(set(layers)) or layers[-1] >= span.start:
        raise ProtocolError(f"taps {list(layers)} came to the hop of layers {span}")
    data = memoryview(body)
    size, odd = divmod(len(data), len(layers))
    if odd or size % row_bytes:
        raise ProtocolError(f"{len(data)} bytes are no rows of {len(layers)} taps")
    return tuple((layer, bytes(data[at * size : (at + 1) * size])) for at, layer in enumerate(layers))


def joined(carried: StepTaps, own: StepTaps, row_bytes: int) -> StepTaps:
    """Both, with the last rows that all of them have; () if there are none, or more taps than a drafter may read."""
    taps = [*carried, *own]
    size = min((len(rows) for _, rows in taps), default=0)
    size -= size % row_bytes
    if not size or len(taps) > MAX_TAPS:
        return ()
    return tuple((layer, rows[len(rows) - size :]) for layer, rows in taps)


def rows_of(taps: StepTaps, layers: Sequence[int], row_bytes: int, rows: int) -> list[TappedRow | None]:
    """For each of a step's `rows` what a drafter of `layers` reads, None where something lacks."""
    by_layer = dict(taps)
    parts = [by_layer.get(layer, b"") for layer in layers]
    count = min(rows, *(len(part) // row_bytes for part in parts))
    found: list[TappedRow | None] = [None] * (rows - count)
    for back in range(count, 0, -1):
        ends = [len(part) - (back - 1) * row_bytes for part in parts]
        found.append(tuple(part[end - row_bytes : end] for part, end in zip(parts, ends, strict=True)))
    return found
