"""When a chain is late, and which of its hops has become slow."""

from __future__ import annotations

import pytest

from swarm.plan.speculation import ChainCosts, Stage
from swarm.types import Chain, CostCurve, Hop
from swarm_client.round_watch import EARLIER, REST, SOON_S, SUSPICIOUS, RoundWatch

CHAIN = Chain((Hop("a", 0, 2), Hop("b", 2, 4)), cost_ms=20.0)
CURVE = CostCurve((1, 16), (1.0, 9.0))


def decode(watch: RoundWatch, step: int, a_ms: float, b_ms: float, rows: int = 1) -> str | None:
    watch.sent(step, rows, now=step * 1.0)
    return watch.settled(step, [(0.0, a_ms), (1.0, b_ms)], now=step + (a_ms + b_ms + 10.0) / 1e3)


def test_patience_follows_the_rounds_and_their_spread_within_bounds() -> None:
    watch = RoundWatch(CHAIN)
    assert watch.patience_s(1.0) == 1.0  # nothing measured
    for step in range(3):
        decode(watch, step, 5.0, 5.0)
    assert watch.patience_s(1.0) == SOON_S
    decode(watch, 3, 5000.0, 5.0, rows=300)  # a piece of a prompt says nothing of what follows it
    assert watch.patience_s(1.0) == SOON_S
    watch = RoundWatch(CHAIN)
    for step, ms in enumerate((180.0, 200.0, 190.0)):
        decode(watch, step, ms, ms)
    assert watch.patience_s(1.0) == pytest.approx((390.0 + 6 * 20.0) / 1e3)
    assert watch.patience_s(0.4) == 0.4


def test_a_hop_is_suspected_after_some_slow_steps_in_a_row_and_then_not_at_once_again() -> None:
    watch = RoundWatch(CHAIN)
    steps = iter(range(100))
    assert [decode(watch, next(steps), 2.0, 2.0) for _ in range(EARLIER)] == [None] * EARLIER
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(SUSPICIOUS - 1)] == [None] * (SUSPICIOUS - 1)
    assert decode(watch, next(steps), 2.0, 2.0) is None  # once it was quick again
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(SUSPICIOUS)] == [None] * (SUSPICIOUS - 1) + ["b"]
    assert watch.slowdown == pytest.approx(42.0 / 14.0)
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(REST - 1)] == [None] * (REST - 1)


def test_steps_of_all_widths_are_compared_by_what_the_curve_promises_for_them() -> None:
    costs = ChainCosts((Stage(2, 1.0, CURVE), Stage(2, 1.0, CURVE)), (1.0, 1.0, 1.0))
    watch = RoundWatch(CHAIN, costs)
    for step in range(8):
        assert decode(watch, step, 2.0, 2.0) is None
    for step in range(8, 16):
        assert decode(watch, step, 18.0, 18.0, rows=16) is None
    assert [decode(watch, 16 + i, 18.0, 90.0, rows=16) for i in range(SUSPICIOUS)][-1] == "b"
