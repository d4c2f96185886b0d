"""Steps of a chain against what is believed of its hops."""

from __future__ import annotations

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.trust.belief import PeerBelief
from swarm.planner.trust.evidence import UNKNOWN
from swarm.planner.trust.policy import POLICY
from swarm.types import Chain, CostCurve, Hop
from swarm_client.trust.chain_watch import ChainWatch

CHAIN = Chain((Hop("a", 0, 10), Hop("b", 10, 20)))
COSTS = ChainCosts((Stage(10, 1.0, CostCurve((1,), (1.0,))),) * 2, (5.0, 5.0, 5.0))


def belief(peer: str, proven: bool, layer_ms: float = 1.0) -> PeerBelief:
    return PeerBelief(peer, "", UNKNOWN, proven, 1.0, layer_ms, layer_ms, 0.0, False, False)


def watch(**options: float) -> ChainWatch:
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
    assert watch().stall_timeout_s(6.0) == POLICY.stranger_stall_s
    of = watch()
    assert of.probe_after_s(1.0) == POLICY.stranger_probe_s
    of.sent(1, 1, 1.0)
    of.on_result(1, [(0.0, 10.0), (0.0, 20.0)], 1.1)
    assert of.probe_after_s(1.0) == 1.0
    proven = ChainWatch(CHAIN, COSTS, {"a": belief("a", True), "b": belief("b", True)})
    assert proven.probe_after_s(1.0) == 1.0
    assert (watch().stranger("a"), watch().stranger("b"), watch().stranger("c")) == (False, True, True)
