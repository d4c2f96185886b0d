"""When a chain is late, and which of its hops has become slow."""

from __future__ import annotations

import pytest

from swarm.types import Chain, Hop
from swarm_client.round_watch import EARLIER, REST, SUSPICIOUS, RoundWatch

CHAIN = Chain((Hop("a", 0, 2), Hop("b", 2, 4)), cost_ms=20.0)


def decode(watch: RoundWatch, step: int, a_ms: float, b_ms: float, rows: int = 1) -> str | None:
    watch.sent(step, rows, now=step * 1.0)
    return watch.settled(step, [(0.0, a_ms), (1.0, b_ms)], now=step + (a_ms + b_ms + 10.0) / 1e3)


def test_patience_follows_the_rounds_and_the_rows_under_way() -> None:
    watch = RoundWatch(CHAIN)
    assert watch.patience_s(1.0) == 1.0  # nothing measured: the map's 20 ms
    watch.sent(0, 256, now=0.0)
    assert watch.patience_s(1.0) > 20.0
    watch.settled(0, [(0.0, 1.0), (0.0, 1.0)], now=0.5)
    for step in range(1, 4):
        decode(watch, step, 200.0, 190.0)
    assert watch.patience_s(1.0) == pytest.approx(6 * 0.4)
    watch.sent(9, 1, now=9.0)
    watch.voided()
    assert watch.patience_s(3.0) == 3.0


def test_a_hop_is_suspected_after_three_slow_steps_in_a_row_and_then_not_at_once_again() -> None:
    watch = RoundWatch(CHAIN)
    steps = iter(range(100))
    assert [decode(watch, next(steps), 2.0, 2.0) for _ in range(EARLIER)] == [None] * EARLIER
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(SUSPICIOUS - 1)] == [None] * (SUSPICIOUS - 1)
    assert decode(watch, next(steps), 2.0, 2.0) is None  # once it was quick again
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(SUSPICIOUS)] == [None, None, "b"]
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(REST - 1)] == [None] * (REST - 1)


def test_wide_steps_are_not_compared_with_narrow_ones() -> None:
    watch = RoundWatch(CHAIN)
    for step in range(8):
        assert decode(watch, step, 2.0, 2.0) is None
    for step in range(8, 16):
        assert decode(watch, step, 20.0, 20.0, rows=16) is None
