"""When a chain is late, and which of its hops has become slow."""

from __future__ import annotations

import pytest

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.types import Chain, CostCurve, Hop
from swarm_client.health.straggler_detector import (
    COOLDOWN_STEPS,
    FAST_PROBE_S,
    MAX_BACKOFF,
    MAX_DECODE_ROWS,
    MIN_PROBE_S,
    MIN_SAMPLES,
    REPAIR_MS,
    SAMPLES_TO_SUSPECT,
    SLOW_RATIO,
    VERY_SLOW_RATIO,
    StragglerDetector,
    StragglerSuspicion,
)

CHAIN = Chain((Hop("a", 0, 2), Hop("b", 2, 4)), cost_ms=20.0)
CURVE = CostCurve((1, 16), (1.0, 9.0))


def decode(
    watch: StragglerDetector, step: int, a_ms: float, b_ms: float, rows: int = 1, held: int = 0
) -> tuple[str, float] | None:
    watch.sent(step, rows, now=step * 1.0)
    found = watch.on_result(step, [(0.0, a_ms), (0.5, b_ms - 0.5)], now=step + (a_ms + b_ms + 10.0) / 1e3, held=held)
    if found is not None:
        watch.assess_pending()
    return (found.peer, found.slowdown) if found is not None else None


def used(
    a_ms: float = 2.0, b_ms: float = 2.0, suspicions: int = 0, costs: ChainCosts | None = None
) -> StragglerDetector:
    """A watch that knows what is usual. Its next step is number `MIN_SAMPLES`."""
    watch = StragglerDetector(CHAIN, costs, suspicions)
    assert [decode(watch, step, a_ms, b_ms) for step in range(MIN_SAMPLES)] == [None] * MIN_SAMPLES
    return watch


def test_patience_follows_the_rounds_and_their_spread_within_bounds() -> None:
    watch = StragglerDetector(CHAIN)
    assert watch.probe_after_s(1.0) == 1.0  # nothing measured
    for step in range(3):
        decode(watch, step, 5.0, 5.0)
    assert watch.probe_after_s(1.0) == MIN_PROBE_S
    decode(watch, 3, 5000.0, 5.0, rows=300)  # a piece of a prompt says nothing of what follows it
    decode(watch, 4, 5.0, 5.0)
    assert watch.probe_after_s(1.0) == MIN_PROBE_S
    watch = StragglerDetector(CHAIN)
    for step, ms in enumerate((180.0, 200.0, 190.0)):
        decode(watch, step, ms, ms)
    assert watch.probe_after_s(1.0) == pytest.approx((390.0 + 6 * 20.0) / 1e3)
    assert watch.probe_after_s(0.4) == 0.4


def test_there_is_less_patience_while_a_hop_may_be_slow() -> None:
    watch = used(20.0, 20.0)
    assert decode(watch, MIN_SAMPLES, 20.0, 70.0) is None
    assert watch.probe_after_s(1.0) == pytest.approx(SLOW_RATIO * 50.0 / 1e3)
    watch = used(1.0, 1.0)
    assert decode(watch, MIN_SAMPLES, 1.0, 30.0) is None
    assert watch.probe_after_s(1.0) == FAST_PROBE_S
    assert decode(watch, MIN_SAMPLES + 1, 1.0, 30.0) is not None
    assert watch.probe_after_s(1.0) >= MIN_PROBE_S  # it was said; nobody need be asked in a hurry


def test_a_hop_is_suspected_after_some_slow_steps_in_a_row_and_then_not_at_once_again() -> None:
    watch = used()
    steps = iter(range(MIN_SAMPLES, 100))
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(SAMPLES_TO_SUSPECT - 1)] == [None] * (
        SAMPLES_TO_SUSPECT - 1
    )
    assert decode(watch, next(steps), 2.0, 2.0) is None  # once it was quick again
    found = [decode(watch, next(steps), 2.0, 30.0) for _ in range(SAMPLES_TO_SUSPECT)]
    assert found == [None] * (SAMPLES_TO_SUSPECT - 1) + [("b", pytest.approx(42.0 / 14.0))]
    assert [decode(watch, next(steps), 2.0, 30.0) for _ in range(COOLDOWN_STEPS - 1)] == [None] * (COOLDOWN_STEPS - 1)


def test_of_two_hops_with_as_many_signs_the_one_that_took_longer_is_suspected() -> None:
    for a_ms, b_ms, who in ((10.0, 60.0, "b"), (60.0, 10.0, "a")):
        watch = used()
        assert decode(watch, MIN_SAMPLES, a_ms, b_ms) is None
        found = decode(watch, MIN_SAMPLES + 1, a_ms, b_ms)
        assert found is not None
        assert found[0] == who


def test_one_step_is_enough_if_it_takes_longer_than_leaving_the_hop_would() -> None:
    assert decode(used(20.0, 20.0), MIN_SAMPLES, 20.0, 20.0 + REPAIR_MS) is None  # a hiccup
    assert decode(used(20.0, 20.0), MIN_SAMPLES, 20.0, 21.0 + REPAIR_MS) == (
        "b",
        pytest.approx((51.0 + REPAIR_MS) / 50.0),
    )
    usual = 100.0
    assert decode(used(20.0, usual), MIN_SAMPLES, 20.0, VERY_SLOW_RATIO * usual) is None
    assert decode(used(20.0, usual), MIN_SAMPLES, 20.0, VERY_SLOW_RATIO * usual + 1.0) is not None


def test_the_more_a_replacement_would_be_fed_the_longer_a_single_step_may_take() -> None:
    costs = ChainCosts((Stage(2, 1.0, CURVE), Stage(2, 1.0, CURVE)), (1.0, 1.0, 1.0))
    held = 10 * MAX_DECODE_ROWS
    feeding_ms = 2.0 * CURVE.ms_at(MAX_DECODE_ROWS) * 10
    watch = used(2.0, 2.0, costs=costs)
    assert decode(watch, MIN_SAMPLES, 2.0, feeding_ms + REPAIR_MS, held=held) is None
    watch = used(2.0, 2.0, costs=costs)
    assert decode(watch, MIN_SAMPLES, 2.0, feeding_ms + REPAIR_MS + 4.0, held=held) is not None


@pytest.mark.parametrize(("suspicions", "times"), [(0, 1), (1, 2), (2, 4), (50, MAX_BACKOFF)])
def test_every_suspicion_doubles_how_long_a_single_step_may_take(suspicions: int, times: int) -> None:
    assert decode(used(suspicions=suspicions), MIN_SAMPLES, 2.0, times * REPAIR_MS) is None
    watch = used(suspicions=suspicions)
    assert decode(watch, MIN_SAMPLES, 2.0, times * REPAIR_MS + 4.0) is not None
    assert watch.suspicions == suspicions + 1


def outstanding(
    watch: StragglerDetector, peer: str, had_ms: float, step: int = MIN_SAMPLES
) -> StragglerSuspicion | None:
    return watch.outstanding(peer, had_ms, now=step + (had_ms + 12.0) / 1e3)


def test_a_step_without_a_result_is_judged_by_how_long_a_hop_has_had_it() -> None:
    watch = used()
    assert watch.oldest is None
    assert outstanding(watch, "b", 5000.0) is None  # nothing is under way
    watch.sent(MIN_SAMPLES, 1, now=MIN_SAMPLES * 1.0)
    watch.sent(MIN_SAMPLES + 1, 1, now=MIN_SAMPLES + 0.1)
    assert watch.oldest == MIN_SAMPLES
    assert outstanding(watch, "b", 100.0) is None
    assert outstanding(watch, "nobody", 5000.0) is None
    found = outstanding(watch, "b", 300.0)
    assert found == StragglerSuspicion("b", pytest.approx(312.0 / 14.0))  # type: ignore[arg-type]
    assert outstanding(watch, "b", 600.0) is not None  # nobody has looked into it
    watch.assess_pending()
    assert outstanding(watch, "b", 900.0) is None


def test_after_a_slow_step_the_next_one_need_not_be_waited_for() -> None:
    watch = used()
    assert decode(watch, MIN_SAMPLES, 2.0, 30.0) is None
    watch.sent(MIN_SAMPLES + 1, 1, now=MIN_SAMPLES + 1.0)
    assert outstanding(watch, "b", 5.0, MIN_SAMPLES + 1) is None
    assert outstanding(watch, "a", 30.0, MIN_SAMPLES + 1) is None  # a was quick before
    found = outstanding(watch, "b", 30.0, MIN_SAMPLES + 1)
    assert found == StragglerSuspicion("b", pytest.approx(3.0))  # type: ignore[arg-type]


def test_prompts_are_not_judged_while_they_are_under_way() -> None:
    watch = used()
    watch.sent(MIN_SAMPLES, 300, now=MIN_SAMPLES * 1.0)
    assert outstanding(watch, "b", 9000.0) is None


def test_steps_of_all_widths_are_compared_by_what_the_curve_promises_for_them() -> None:
    costs = ChainCosts((Stage(2, 1.0, CURVE), Stage(2, 1.0, CURVE)), (1.0, 1.0, 1.0))
    watch = StragglerDetector(CHAIN, costs)
    for step in range(8):
        assert decode(watch, step, 2.0, 2.0) is None
    for step in range(8, 16):
        assert decode(watch, step, 18.0, 18.0, rows=16) is None
    assert [decode(watch, 16 + i, 18.0, 90.0, rows=16) for i in range(SAMPLES_TO_SUSPECT)][-1] is not None
