"""Steps of a chain against what is believed of its hops."""

from __future__ import annotations

from typing import Any

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.trust.belief import PeerBelief
from swarm.planner.trust.evidence import UNKNOWN, FailureKind, PeerEvidence, failed, finished
from swarm.planner.trust.policy import POLICY
from swarm.types import Chain, CostCurve, Hop
from swarm_client.trust.chain_watch import ChainWatch

CHAIN = Chain((Hop("a", 0, 10), Hop("b", 10, 20)))
COSTS = ChainCosts((Stage(10, 1.0, CostCurve((1,), (1.0,))),) * 2, (5.0, 5.0, 5.0))


def belief(peer: str, proven: bool, layer_ms: float = 1.0, evidence: PeerEvidence = UNKNOWN) -> PeerBelief:
    return PeerBelief(peer, "", evidence, proven, 1.0, layer_ms, layer_ms, 0.0, False, False)


def watch(**options: Any) -> ChainWatch:
    return ChainWatch(CHAIN, COSTS, {"a": belief("a", True), "b": belief("b", False, **options)})


def run(of: ChainWatch, step: int, round_s: float, b_ms: float) -> None:
    of.sent(step, 1, float(step))
    of.on_result(step, [(0.0, 10.0), (0.0, b_ms)], step + round_s)


def test_a_hop_that_says_it_is_slow_and_one_that_hides_it_are_found_alike() -> None:
    for b_ms in (900.0, 10.0):
        of = watch()
        run(of, 0, 0.95, b_ms)
        assert of.slow_from_start is None  # once may be chance
        run(of, 1, 0.95, b_ms)
        assert of.slow_from_start == "b"
        assert of.slowdown > 10.0
        run(of, 2, 0.04, 10.0)
        assert of.slow_from_start is None


def test_slowness_that_was_expected_is_no_surprise() -> None:
    of = watch(layer_ms=90.0)
    for step in range(4):
        run(of, step, 0.95, 900.0)
    assert of.slow_from_start is None


def test_times_by_layer_and_only_of_steps_that_went_alone() -> None:
    of = watch()
    of.sent(0, 1, 0.0)
    times = of.on_result(0, [(0.0, 10.0), (5.0, 20.0)], 0.05)
    assert times is not None
    assert times.measured_ms == {"a": 1.0, "b": 2.5}
    assert times.advertised_ms == {"a": 1.0, "b": 1.0}
    of.sent(1, 1, 1.0)
    of.sent(2, 1, 1.0)
    assert of.on_result(1, [(0.0, 10.0), (0.0, 20.0)], 1.1) is None
    assert of.on_result(2, [(0.0, 10.0), (0.0, 20.0)], 1.1) is None
    of.sent(3, 1, 2.0)
    of.on_discard()
    of.sent(4, 1, 2.0)
    assert of.on_result(4, [(0.0, 10.0)], 2.1) is None  # a trace of another length
    assert of.on_result(99, [(0.0, 10.0), (0.0, 20.0)], 2.1) is None  # a step that was never sent
    assert of.rows == 4


def test_strangers_are_hurried_until_their_chain_has_answered() -> None:
    of = watch()
    assert of.probe_after_s(1.0) == POLICY.stranger_probe_s
    of.sent(1, 1, 1.0)
    of.on_result(1, [(0.0, 10.0), (0.0, 20.0)], 1.1)
    assert of.probe_after_s(1.0) == 1.0
    proven = ChainWatch(CHAIN, COSTS, {"a": belief("a", True), "b": belief("b", True)})
    assert proven.probe_after_s(1.0) == 1.0
    assert (watch().stranger("a"), watch().stranger("b"), watch().stranger("c")) == (False, True, True)


def stalled(of: ChainWatch, peer: str, lasted_s: float, **how: Any) -> str:
    why = of.stalled(peer, lasted_s, 6.0, **how)
    return "" if why is None else why.code


def test_how_long_a_hop_may_hold_a_step() -> None:
    of = watch()
    assert stalled(of, "a", 5.9) == ""  # it is proven
    assert stalled(of, "a", 6.0) == "stalled"
    assert stalled(of, "b", POLICY.first_step_s - 0.01) == ""
    assert stalled(of, "b", POLICY.first_step_s) == "too_slow"
    for on_edge in (False, True):
        assert stalled(of, "b", POLICY.stranger_stall_s, on_edge=on_edge) == "stalled"
    assert stalled(of, "b", POLICY.stranger_stall_s, slack_s=1.0) == "too_slow"
    of.sent(1, 1, 1.0)
    of.on_result(1, [(0.0, 10.0), (0.0, 20.0)], 1.1)
    assert stalled(of, "b", POLICY.stranger_stall_s - 0.01) == ""  # the chain has answered


def test_a_step_on_a_slow_link_may_take_as_long_as_that() -> None:
    of = watch()
    of.row_bytes, of.widest = 4 * 8192, 32
    link_s = 32 * 4 * 8192 / POLICY.slow_link_bytes_s
    there_s = POLICY.first_step_ratio * COSTS.stages[1].ms(32) / 1e3
    assert stalled(of, "b", 0.99 * there_s, slack_s=9.0) == ""
    assert stalled(of, "b", 1.01 * there_s, slack_s=9.0) == "too_slow"
    assert stalled(of, "b", 0.99 * (there_s + link_s), on_edge=True, slack_s=9.0) == ""
    assert stalled(of, "b", 1.01 * (there_s + link_s), on_edge=True, slack_s=9.0) == "too_slow"


def test_a_first_hiccup_is_slowness_and_a_second_one_a_stall() -> None:
    once = failed(UNKNOWN, FailureKind.SLOW, 1.0)
    assert stalled(watch(evidence=once), "b", POLICY.first_step_s) == "stalled"
    assert stalled(watch(evidence=finished(once, 8.0)), "b", POLICY.first_step_s) == "too_slow"  # it has served since


def test_an_answer_that_has_left_some_hops_is_patient() -> None:
    of = watch()
    assert stalled(of, "b", 1.9, left=POLICY.max_hasty - 1) == "too_slow"
    assert stalled(of, "b", 1.9, left=POLICY.max_hasty) == ""
    assert stalled(of, "b", 2.0, left=POLICY.max_hasty) == "stalled"


def test_a_hop_that_says_it_takes_long_may() -> None:
    costs = ChainCosts((Stage(10, 1.0, CostCurve((1, 64), (1.0, 20.0))),) * 2, (5.0, 5.0, 5.0))
    of = ChainWatch(CHAIN, costs, {"b": belief("b", False)})
    of.widest = 64  # 200 ms of ten layers
    assert stalled(of, "b", 8 * 0.2 - 0.01) == ""
    assert stalled(of, "b", 8 * 0.2) == "too_slow"
    of.widest = 1
    of.sent(1, 64, 1.0)
    assert stalled(of, "b", 8 * 0.2 - 0.01) == ""
