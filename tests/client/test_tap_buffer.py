"""Taps at the client: which rows are the text's, and what hops may not send."""

from __future__ import annotations

import pytest

from swarm.errors import ProtocolError
from swarm.planner.generation.state_machine import SendStep
from swarm.tap_messages import TapRows, WireTaps
from swarm.types import Chain, Hop, Taps, tapped_row_bytes
from swarm_client.session.tap_buffer import TapBuffer

CHAIN = Chain((Hop("a", 0, 3), Hop("b", 3, 8)))
TAPS = Taps((2, 4, 8), 4, window=6)
SIZE = tapped_row_bytes(4, 8)


def body(first: int, count: int) -> bytes:
    return b"".join(bytes([first + i]) * SIZE for i in range(count))


def frame(step: int, layer: int, epoch: int = 0) -> TapRows:
    return TapRows(bytes(16), epoch, step, layer)


def arrive(buffer: TapBuffer, step: int, first: int, count: int) -> None:
    for peer, layer in (("a", 2), ("b", 4), ("b", 8)):
        buffer.add(CHAIN, peer, frame(step, layer), body(first, count))
    buffer.finished(step)


def test_every_hop_is_asked_for_its_own() -> None:
    buffer = TapBuffer(TAPS)
    buffer.begin(20)
    assert buffer.asked_of(CHAIN.hops[0], tail=False) == WireTaps([2], 8, 14)
    assert buffer.asked_of(CHAIN.hops[1], tail=True) == WireTaps([4, 8], 8, 14)
    assert buffer.asked_of(Hop("c", 5, 8), tail=False) is None
    assert TapBuffer(None).asked_of(CHAIN.hops[0], tail=False) is None
    buffer.begin(24, committed=22)
    assert buffer.asked_of(CHAIN.hops[0], tail=False) == WireTaps([2], 8, 22)


def test_rows_of_the_prompts_end_and_of_accepted_drafts_are_the_texts() -> None:
    buffer = TapBuffer(TAPS)
    buffer.begin(10)
    buffer.sent(SendStep(0, 0, 0, tuple(range(7)), sample=False))  # positions 0..6, wanted from 4 on
    buffer.sent(SendStep(0, 1, 7, (7, 8, 9), True, rows=(1, 2, 3), parents=(-1, 0, -1), slots=(0, 1, 2)))
    arrive(buffer, 0, 4, 3)
    arrive(buffer, 1, 7, 6)
    taken = buffer.take((0, 1, 2), 9)  # the last causal row, then two drafts below it
    assert {position: row[0][0] for position, row in taken.items()} == {p: p for p in range(4, 12)}
    assert all(len(row) == 3 and {len(part) for part in row} == {SIZE} for row in taken.values())
    assert buffer.take((), 12) == {}
    buffer.sent(SendStep(0, 2, 12, (), True, rows=(5, 6), parents=(-1, -1), slots=(3, 4)))  # drafts alone
    arrive(buffer, 2, 50, 2)
    assert {p: row[0][0] for p, row in buffer.take((1,), 12).items()} == {12: 51}


def test_a_row_that_lacks_a_tap_is_left_out_and_late_ones_are_ignored() -> None:
    buffer = TapBuffer(TAPS)
    buffer.begin(3)
    for step in range(3):
        buffer.sent(SendStep(0, step, step, (1,), sample=True))
    buffer.add(CHAIN, "a", frame(0, 2), body(0, 1))
    buffer.finished(0)
    assert buffer.take((0,), 0) == {}
    buffer.add(CHAIN, "b", frame(0, 4), body(0, 1))  # late
    buffer.add(CHAIN, "a", frame(1, 2, epoch=5), body(0, 1))  # of another time
    arrive(buffer, 2, 2, 1)  # step 1 was discarded
    assert list(buffer.take((0,), 2)) == [2]
    buffer.finished(1)
    buffer.finished(99)
    assert buffer.take((), 3) == {}
    for _ in range(3 * 3 - 2):
        buffer.add(CHAIN, "b", frame(0, 4), body(0, 1))
    with pytest.raises(ProtocolError, match="again and again"):
        buffer.add(CHAIN, "b", frame(0, 4), body(0, 1))


def test_what_nobody_asked_for_breaks_the_protocol() -> None:
    buffer = TapBuffer(TAPS)
    buffer.begin(3)
    buffer.sent(SendStep(0, 0, 0, (1, 2, 3), sample=True))
    for peer, message, sent in (
        ("a", frame(0, 4), body(0, 3)),  # another hop's
        ("b", frame(0, 5), body(0, 3)),  # nobody's
        ("a", frame(1, 2), body(0, 3)),  # no such step
        ("a", frame(0, 2), body(0, 2)),
        ("a", frame(0, 2), body(0, 4)),
        ("a", frame(0, 2), b""),
    ):
        with pytest.raises(ProtocolError):
            buffer.add(CHAIN, peer, message, sent)
    buffer.add(CHAIN, "a", frame(0, 2), body(0, 3))
    with pytest.raises(ProtocolError):
        buffer.add(CHAIN, "a", frame(0, 2), body(0, 3))  # twice
    off = TapBuffer(None)
    off.sent(SendStep(0, 0, 0, (1,), sample=True))
    with pytest.raises(ProtocolError, match="nobody asked for"):
        off.add(CHAIN, "a", frame(0, 2), body(0, 1))
    off.finished(0)
    assert off.take((0,), 0) == {}


def test_rows_before_the_window_are_not_expected() -> None:
    buffer = TapBuffer(TAPS)
    buffer.begin(20)
    buffer.sent(SendStep(0, 0, 0, tuple(range(10)), sample=False))
    with pytest.raises(ProtocolError):
        buffer.add(CHAIN, "a", frame(0, 2), b"")
    buffer.finished(0)
    assert buffer.take((), 10) == {}
