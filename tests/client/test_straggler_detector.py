"""The straggler detector: when a chain is late, and which of its hops has become slow."""

from __future__ import annotations

import pytest

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.types import Chain, CostCurve, Hop
from swarm_client.health.straggler_detector import StragglerDetector, StragglerPolicy, StragglerSuspicion

POLICY = StragglerPolicy()
CHAIN = Chain((Hop("a", 0, 2), Hop("b", 2, 4)), cost_ms=20.0)
CURVE = CostCurve((1, 16), (1.0, 9.0))


def decode(
    detector: StragglerDetector, step: int, a_ms: float, b_ms: float, rows: int = 1, held: int = 0
) -> tuple[str, float] | None:
    detector.sent(step, rows, now=step * 1.0)
    found = detector.on_result(step, [(0.0, a_ms), (0.5, b_ms - 0.5)], now=step + (a_ms + b_ms + 10.0) / 1e3, held=held)
    if found is not None:
        detector.on_assessed()
    return (found.peer, found.slowdown) if found is not None else None


def used(
    a_ms: float = 2.0, b_ms: float = 2.0, suspicions: int = 0, costs: ChainCosts | None = None
) -> StragglerDetector:
    """A detector with enough samples for its medians. Its next step is number `POLICY.min_samples`."""
    detector = StragglerDetector(CHAIN, costs, suspicions)
    assert [decode(detector, step, a_ms, b_ms) for step in range(POLICY.min_samples)] == [None] * POLICY.min_samples
    return detector


def test_the_probe_timeout_follows_the_iterations_and_their_deviation_within_bounds() -> None:
    detector = StragglerDetector(CHAIN)
    assert detector.probe_after_s(1.0) == 1.0  # nothing measured
    for step in range(3):
        decode(detector, step, 5.0, 5.0)
    assert detector.probe_after_s(1.0) == POLICY.min_probe_s
    decode(detector, 3, 5000.0, 5.0, rows=300)  # a prefill chunk says nothing of the decode steps after it
    decode(detector, 4, 5.0, 5.0)
    assert detector.probe_after_s(1.0) == POLICY.min_probe_s
    detector = StragglerDetector(CHAIN)
    for step, ms in enumerate((180.0, 200.0, 190.0)):
        decode(detector, step, ms, ms)
    assert detector.probe_after_s(1.0) == pytest.approx((390.0 + 6 * 20.0) / 1e3)
    assert detector.probe_after_s(0.4) == 0.4


def test_hops_are_probed_sooner_while_one_may_be_slow() -> None:
    detector = used(20.0, 20.0)
    assert decode(detector, POLICY.min_samples, 20.0, 70.0) is None
    assert detector.probe_after_s(1.0) == pytest.approx(POLICY.slow_ratio * 50.0 / 1e3)
    detector = used(1.0, 1.0)
    assert decode(detector, POLICY.min_samples, 1.0, 30.0) is None
    assert detector.probe_after_s(1.0) == POLICY.fast_probe_s
    assert decode(detector, POLICY.min_samples + 1, 1.0, 30.0) is not None
    assert detector.probe_after_s(1.0) >= POLICY.min_probe_s  # suspected already: no need to probe soon


def test_a_hop_is_suspected_after_some_slow_steps_in_a_row_and_then_not_at_once_again() -> None:
    detector = used()
    steps = iter(range(POLICY.min_samples, 100))
    assert [decode(detector, next(steps), 2.0, 30.0) for _ in range(POLICY.samples_to_suspect - 1)] == [None] * (
        POLICY.samples_to_suspect - 1
    )
    assert decode(detector, next(steps), 2.0, 2.0) is None  # once it was quick again
    found = [decode(detector, next(steps), 2.0, 30.0) for _ in range(POLICY.samples_to_suspect)]
    assert found == [None] * (POLICY.samples_to_suspect - 1) + [("b", pytest.approx(42.0 / 14.0))]
    resting = POLICY.cooldown_steps - 1
    assert [decode(detector, next(steps), 2.0, 30.0) for _ in range(resting)] == [None] * resting


def test_of_two_hops_with_as_many_samples_the_one_that_took_longer_is_suspected() -> None:
    for a_ms, b_ms, who in ((10.0, 60.0, "b"), (60.0, 10.0, "a")):
        detector = used()
        assert decode(detector, POLICY.min_samples, a_ms, b_ms) is None
        found = decode(detector, POLICY.min_samples + 1, a_ms, b_ms)
        assert found is not None
        assert found[0] == who


def test_one_step_is_enough_if_it_takes_longer_than_evicting_the_hop_would() -> None:
    assert decode(used(20.0, 20.0), POLICY.min_samples, 20.0, 20.0 + POLICY.repair_ms) is None  # a hiccup
    assert decode(used(20.0, 20.0), POLICY.min_samples, 20.0, 21.0 + POLICY.repair_ms) == (
        "b",
        pytest.approx((51.0 + POLICY.repair_ms) / 50.0),
    )
    usual = 100.0
    assert decode(used(20.0, usual), POLICY.min_samples, 20.0, POLICY.very_slow_ratio * usual) is None
    assert decode(used(20.0, usual), POLICY.min_samples, 20.0, POLICY.very_slow_ratio * usual + 1.0) is not None


def test_the_more_would_be_replayed_to_a_replacement_the_longer_a_single_step_may_take() -> None:
    costs = ChainCosts((Stage(2, 1.0, CURVE), Stage(2, 1.0, CURVE)), (1.0, 1.0, 1.0))
    held = 10 * POLICY.max_decode_rows
    replay_ms = 2.0 * CURVE.ms_at(POLICY.max_decode_rows) * 10
    detector = used(2.0, 2.0, costs=costs)
    assert decode(detector, POLICY.min_samples, 2.0, replay_ms + POLICY.repair_ms, held=held) is None
    detector = used(2.0, 2.0, costs=costs)
    assert decode(detector, POLICY.min_samples, 2.0, replay_ms + POLICY.repair_ms + 4.0, held=held) is not None


@pytest.mark.parametrize(("suspicions", "times"), [(0, 1), (1, 2), (2, 4), (50, POLICY.max_backoff)])
def test_every_suspicion_doubles_how_long_a_single_step_may_take(suspicions: int, times: int) -> None:
    assert decode(used(suspicions=suspicions), POLICY.min_samples, 2.0, times * POLICY.repair_ms) is None
    detector = used(suspicions=suspicions)
    assert decode(detector, POLICY.min_samples, 2.0, times * POLICY.repair_ms + 4.0) is not None
    assert detector.suspicions == suspicions + 1


def outstanding(
    detector: StragglerDetector, peer: str, held_ms: float, step: int = POLICY.min_samples
) -> StragglerSuspicion | None:
    return detector.outstanding(peer, held_ms, now=step + (held_ms + 12.0) / 1e3)


def test_a_step_without_a_result_is_assessed_by_how_long_a_hop_has_had_it() -> None:
    detector = used()
    assert detector.oldest is None
    assert outstanding(detector, "b", 5000.0) is None  # nothing is in flight
    detector.sent(POLICY.min_samples, 1, now=POLICY.min_samples * 1.0)
    detector.sent(POLICY.min_samples + 1, 1, now=POLICY.min_samples + 0.1)
    assert detector.oldest == POLICY.min_samples
    assert outstanding(detector, "b", 100.0) is None
    assert outstanding(detector, "nobody", 5000.0) is None
    found = outstanding(detector, "b", 300.0)
    assert found == StragglerSuspicion("b", pytest.approx(312.0 / 14.0))  # type: ignore[arg-type]
    assert outstanding(detector, "b", 600.0) is not None  # not assessed yet
    detector.on_assessed()
    assert outstanding(detector, "b", 900.0) is None


def test_after_a_slow_step_the_next_one_need_not_be_waited_for() -> None:
    detector = used()
    assert decode(detector, POLICY.min_samples, 2.0, 30.0) is None
    detector.sent(POLICY.min_samples + 1, 1, now=POLICY.min_samples + 1.0)
    assert outstanding(detector, "b", 5.0, POLICY.min_samples + 1) is None
    assert outstanding(detector, "a", 30.0, POLICY.min_samples + 1) is None  # a was quick before
    found = outstanding(detector, "b", 30.0, POLICY.min_samples + 1)
    assert found == StragglerSuspicion("b", pytest.approx(3.0))  # type: ignore[arg-type]


def test_prefill_steps_are_not_assessed_while_they_are_in_flight() -> None:
    detector = used()
    detector.sent(POLICY.min_samples, 300, now=POLICY.min_samples * 1.0)
    assert outstanding(detector, "b", 9000.0) is None


def test_steps_of_all_widths_are_compared_by_the_cost_curve() -> None:
    costs = ChainCosts((Stage(2, 1.0, CURVE), Stage(2, 1.0, CURVE)), (1.0, 1.0, 1.0))
    detector = StragglerDetector(CHAIN, costs)
    for step in range(8):
        assert decode(detector, step, 2.0, 2.0) is None
    for step in range(8, 16):
        assert decode(detector, step, 18.0, 18.0, rows=16) is None
    assert [decode(detector, 16 + i, 18.0, 90.0, rows=16) for i in range(POLICY.samples_to_suspect)][-1] is not None
