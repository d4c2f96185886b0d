"""The taps of one session as they come in: rows of steps under way, then of the text.

Owns which of them were asked for, and what is dropped: rows of a step whose result came first, or of which a tap is
missing. Knows neither drafters nor the draft tree; a row is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.codec import Buffer
from swarm.errors import ProtocolError
from swarm.planner.generation.state_machine import SendStep
from swarm.tap_messages import TapRows, WireTaps, skipped_rows
from swarm.types import Chain, Hop, TappedRow, TappedRows, Taps


@dataclass(slots=True)
class _StepRows:
    """`skipped`: of its first rows that no hop sends. `bodies`: by tap."""

    epoch: int
    start: int  # position of the first causal row
    causal: int
    rows: int
    skipped: int
    bodies: dict[int, Buffer] = field(default_factory=dict)


class TapBuffer:
    """`begin`, then `sent` with every step, `add` with every frame, `finished` with every result, and `take`."""

    def __init__(self, taps: Taps | None) -> None:
        self._taps = taps
        self._first = 0  # position from which on rows are asked for
        self._steps: dict[int, _StepRows] = {}  # without a result yet
        self._next_step = 0
        self._late = 0  # frames that came after their result: one for each step and tap, at most
        self._last: _StepRows | None = None  # the step whose result came last
        self._text: dict[int, TappedRow] = {}  # of causal rows, until they are taken

    def begin(self, tokens: int, committed: int = 0) -> None:
        """A chain is opened for a text of `tokens`, or repaired when `committed` of them had passed it."""
        window = self._taps.window if self._taps is not None else 0
        self._first = max(committed, tokens - window, 0)

    def asked_of(self, hop: Hop, *, tail: bool) -> WireTaps | None:
        """None if it has none of the taps."""
        layers = self._taps.of_hop(hop.start, hop.end, tail=tail) if self._taps is not None else ()
        return WireTaps(list(layers), self._taps.bits, self._first) if self._taps is not None and layers else None

    def sent(self, step: SendStep) -> None:
        if self._taps is None:
            return
        start, causal = step.committed_before + len(step.commit_slots), len(step.tokens)
        skipped = skipped_rows(start, causal, self._first)
        self._steps[step.step] = _StepRows(step.epoch, start, causal, causal + len(step.rows), skipped)
        self._next_step = step.step + 1

    def add(self, chain: Chain, peer: str, message: TapRows, body: Buffer) -> None:
        """Rows from the hop `peer`; late ones are ignored. Raises ProtocolError for what was not asked of it."""
        hop = chain.hops[chain.peers.index(peer)]
        if self._taps is None or message.layer not in self._taps.of_hop(hop.start, hop.end, tail=hop is chain.hops[-1]):
            raise ProtocolError(f"node {peer} sent hidden states that nobody asked for")
        if message.step >= self._next_step:
            raise ProtocolError(f"node {peer} sent hidden states of a step that was not sent")
        step = self._steps.get(message.step)
        if step is None or message.epoch != step.epoch:
            self._late += 1
            if self._late > self._next_step * len(self._taps.layers):
                raise ProtocolError(f"node {peer} sent hidden states of old steps again and again")
            return
        expected = (step.rows - step.skipped) * self._taps.row_bytes
        if len(body) != expected or not expected or message.layer in step.bodies:
            raise ProtocolError(f"node {peer} sent {len(body)} bytes of hidden states instead of {expected}")
        step.bodies[message.layer] = body

    def finished(self, number: int) -> None:
        """The result of a step is here; results come in order, so those before it have none any more."""
        step = self._steps.pop(number, None)
        if step is None:
            return
        self._steps = {other: rows for other, rows in self._steps.items() if other > number}
        self._last = step
        for row in range(step.skipped, step.causal):
            self._keep(self._text, step.start + row, row)

    def take(self, samples: Sequence[int], position: int) -> TappedRows:
        """The rows of the text that came since it was last called: of causal rows, and of those rows of the last step
        that tokens of the text were sampled from. `samples`: which of its sampled rows; `position`: of the first."""
        text, self._text = self._text, {}
        if self._last is not None:
            first = max(self._last.causal - 1, 0)  # the first row that is sampled from
            for offset, sample in enumerate(samples):
                self._keep(text, position + offset, first + sample)
        return text

    def _keep(self, text: dict[int, TappedRow], position: int, row: int) -> None:
        """One row of the last step, if all of its taps are here."""
        step, taps = self._last, self._taps
        if step is None or taps is None or len(step.bodies) < len(taps.layers) or not step.skipped <= row < step.rows:
            return
        at = (row - step.skipped) * taps.row_bytes
        text[position] = tuple(bytes(memoryview(step.bodies[tap])[at : at + taps.row_bytes]) for tap in taps.layers)
