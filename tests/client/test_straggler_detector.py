"""When a chain is late, and which of its hops has become slow."""

from __future__ import annotations

import pytest

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.types import Chain, CostCurve, Hop
from swarm_client.health.straggler_detector import (
    AGAIN_S,
    DECODING,
    EARLIER,
    MAX_DOUBT,
    REPAIR_MS,
    REST,
    SLOW,
    SOON_S,
    SUSPICIOUS,
    VERY_SLOW,
    RoundWatch,
    Suspicion,
)

CHAIN = Chain((Hop("a", 0, 2), Hop("b", 2, 4)), cost_ms=20.0)
CURVE = CostCurve((1, 16), (1.0, 9.0))


def decode(
    watch: RoundWatch, step: int, a_ms: float, b_ms: float, rows: int = 1, held: int = 0
) -> tuple[str, float] | None:
    watch.sent(step, rows, now=step * 1.0)
    found = watch.settled(step, [(0.0, a_ms), (0.5, b_ms - 0.5)], now=step + (a_ms + b_ms + 10.0) / 1e3, held=held)
    if found is not None:
        watch.judged()
    return (found.peer, found.slowdown) if found is not None else None


def used(a_ms: float = 2.0, b_ms: float = 2.0, suspicions: int = 0, costs: ChainCosts | None = None) -> RoundWatch:
    """A watch that knows what is usual. Its next step is number `EARLIER`."""
    watch = RoundWatch(CHAIN, costs, suspicions)
    assert [decode(watch, step, a_ms, b_ms) for step in range(EARLIER)] == [None] * EARLIER
    return watch


def test_patience_follows_the_rounds_and_their_spread_within_bounds() -> None:
    watch = RoundWatch(CHAIN)
    assert watch.patience_s(1.0) == 1.0  # nothing measured
    for step in range(3):
        decode(watch, step, 5.0, 5.0)
    assert watch.patience_s(1.0) == SOON_S
    decode(watch, 3, 5000.0, 5.0, rows=300)  # a piece of a prompt says nothing of what follows it
    decode(watch, 4, 5.0, 5.0)
    assert watch.patience_s(1.0) == SOON_S
    watch = RoundWatch(CHAIN)
    for step, ms in enumerate((180.0, 200.0, 190.0)):
        decode(watch, step, ms, ms)
    assert watch.patience_s(1.0) == pytest.approx((390.0 + 6 * 20.0) / 1e3)
    assert watch.patience_s(0.4) == 0.4


def test_there_is_less_patience_while_a_hop_may_be_slow() -> None:
    watch = used(20.0, 20.0)
    assert decode(watch, EARLIER, 20.0, 70.0) is None
    assert watch.patience_s(1.0) == pytest.approx(SLOW * 50.0 / 1e3)
    watch = used(1.0, 1.0)
    assert decode(watch, EARLIER, 1.0, 30.0) is None
    assert watch.patience_s(1.0) == AGAIN_S
    assert decode(watch, EARLIER + 1, 1.0, 30.0) is not None
    assert watch.patience_s(1.0) >= SOON_S  # it was said; nobody need be asked in a hurry


def test_a_hop_is_suspected_after_some_slow_steps_in_a_row_and_then_not_at_once_again() -> None:
    watch = used()
    steps = iter(range(EARLIER, 100))
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(SUSPICIOUS - 1)] == [None] * (SUSPICIOUS - 1)
    assert decode(watch, next(steps), 2.0, 2.0) is None  # once it was quick again
    found = [decode(watch, next(steps), 2.0, 30.0) for _ in range(SUSPICIOUS)]
    assert found == [None] * (SUSPICIOUS - 1) + [("b", pytest.approx(42.0 / 14.0))]
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(REST - 1)] == [None] * (REST - 1)


def test_of_two_hops_with_as_many_signs_the_one_that_took_longer_is_suspected() -> None:
    for a_ms, b_ms, who in ((10.0, 60.0, "b"), (60.0, 10.0, "a")):
        watch = used()
        assert decode(watch, EARLIER, a_ms, b_ms) is None
        found = decode(watch, EARLIER + 1, a_ms, b_ms)
        assert found is not None
        assert found[0] == who


def test_one_step_is_enough_if_it_takes_longer_than_leaving_the_hop_would() -> None:
    assert decode(used(20.0, 20.0), EARLIER, 20.0, 20.0 + REPAIR_MS) is None  # a hiccup
    assert decode(used(20.0, 20.0), EARLIER, 20.0, 21.0 + REPAIR_MS) == ("b", pytest.approx((51.0 + REPAIR_MS) / 50.0))
    usual = 100.0
    assert decode(used(20.0, usual), EARLIER, 20.0, VERY_SLOW * usual) is None
    assert decode(used(20.0, usual), EARLIER, 20.0, VERY_SLOW * usual + 1.0) is not None


def test_the_more_a_replacement_would_be_fed_the_longer_a_single_step_may_take() -> None:
    costs = ChainCosts((Stage(2, 1.0, CURVE), Stage(2, 1.0, CURVE)), (1.0, 1.0, 1.0))
    held = 10 * DECODING
    feeding_ms = 2.0 * CURVE.at(DECODING) * 10
    watch = used(2.0, 2.0, costs=costs)
    assert decode(watch, EARLIER, 2.0, feeding_ms + REPAIR_MS, held=held) is None
    watch = used(2.0, 2.0, costs=costs)
    assert decode(watch, EARLIER, 2.0, feeding_ms + REPAIR_MS + 4.0, held=held) is not None


@pytest.mark.parametrize(("suspicions", "times"), [(0, 1), (1, 2), (2, 4), (50, MAX_DOUBT)])
def test_every_suspicion_doubles_how_long_a_single_step_may_take(suspicions: int, times: int) -> None:
    assert decode(used(suspicions=suspicions), EARLIER, 2.0, times * REPAIR_MS) is None
    watch = used(suspicions=suspicions)
    assert decode(watch, EARLIER, 2.0, times * REPAIR_MS + 4.0) is not None
    assert watch.suspicions == suspicions + 1


def outstanding(watch: RoundWatch, peer: str, had_ms: float, step: int = EARLIER) -> Suspicion | None:
    return watch.outstanding(peer, had_ms, now=step + (had_ms + 12.0) / 1e3)


def test_a_step_without_a_result_is_judged_by_how_long_a_hop_has_had_it() -> None:
    watch = used()
    assert watch.oldest is None
    assert outstanding(watch, "b", 5000.0) is None  # nothing is under way
    watch.sent(EARLIER, 1, now=EARLIER * 1.0)
    watch.sent(EARLIER + 1, 1, now=EARLIER + 0.1)
    assert watch.oldest == EARLIER
    assert outstanding(watch, "b", 100.0) is None
    assert outstanding(watch, "nobody", 5000.0) is None
    found = outstanding(watch, "b", 300.0)
    assert found == Suspicion("b", pytest.approx(312.0 / 14.0))  # type: ignore[arg-type]
    assert outstanding(watch, "b", 600.0) is not None  # nobody has looked into it
    watch.judged()
    assert outstanding(watch, "b", 900.0) is None


def test_after_a_slow_step_the_next_one_need_not_be_waited_for() -> None:
    watch = used()
    assert decode(watch, EARLIER, 2.0, 30.0) is None
    watch.sent(EARLIER + 1, 1, now=EARLIER + 1.0)
    assert outstanding(watch, "b", 5.0, EARLIER + 1) is None
    assert outstanding(watch, "a", 30.0, EARLIER + 1) is None  # a was quick before
    found = outstanding(watch, "b", 30.0, EARLIER + 1)
    assert found == Suspicion("b", pytest.approx(3.0))  # type: ignore[arg-type]


def test_prompts_are_not_judged_while_they_are_under_way() -> None:
    watch = used()
    watch.sent(EARLIER, 300, now=EARLIER * 1.0)
    assert outstanding(watch, "b", 9000.0) is None


def test_steps_of_all_widths_are_compared_by_what_the_curve_promises_for_them() -> None:
    costs = ChainCosts((Stage(2, 1.0, CURVE), Stage(2, 1.0, CURVE)), (1.0, 1.0, 1.0))
    watch = RoundWatch(CHAIN, costs)
    for step in range(8):
        assert decode(watch, step, 2.0, 2.0) is None
    for step in range(8, 16):
        assert decode(watch, step, 18.0, 18.0, rows=16) is None
    assert [decode(watch, 16 + i, 18.0, 90.0, rows=16) for i in range(SUSPICIOUS)][-1] is not None
