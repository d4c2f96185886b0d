"""Every row, step and draft-model call must be worth its time."""

from __future__ import annotations

import pytest

from swarm.errors import UsageError
from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.costs.online_costs import Observation, OnlineChainCosts
from swarm.planner.generation.events import SpeculationPolicy
from swarm.planner.speculation.marginal_policy import SpeculationCosts, choose_policy, pipeline_depth
from swarm.types import CostCurve

CURVE = CostCurve((1, 2, 4, 8, 16, 32), (0.4, 0.42, 0.48, 0.6, 0.9, 1.5))
FLAT = CostCurve((1, 8, 32), (0.4, 0.4, 0.4))


def chain(hops: int, link_ms: float, curve: CostCurve = CURVE) -> ChainCosts:
    return ChainCosts(tuple(Stage(30 // hops, curve.ms_at(1), curve) for _ in range(hops)), (link_ms,) * (hops + 1))


def plain(costs: ChainCosts, **others: float) -> SpeculationCosts:
    """As fast as plain decoding."""
    return SpeculationCosts(1 / costs.iteration_ms(1), **others)


def test_slow_links_make_rows_and_speculative_steps_cheap() -> None:
    near, far = chain(4, 0.0), chain(4, 40.0)
    here, there = choose_policy(near, plain(near)), choose_policy(far, plain(far))
    assert there.min_node_prob < here.min_node_prob / 3
    assert there.min_path_prob < here.min_path_prob / 3
    assert there.max_steps_in_flight > here.max_steps_in_flight
    assert choose_policy(chain(1, 0.0), plain(chain(1, 0.0))).min_path_prob > 1, "one hop alone: nothing can overlap"
    assert choose_policy(chain(4, 20.0, FLAT), plain(far)).min_node_prob == pytest.approx(0.0)


def test_a_step_at_most_doubles_what_its_hops_compute() -> None:
    steep = CostCurve((1, 4, 32), (0.4, 0.9, 5.0))
    for curve, rows in ((FLAT, 32), (CURVE, 12), (steep, 8)):  # CURVE: .6 + 4 * .0375 = .75 <= .8 < .9
        costs = chain(4, 20.0, curve)
        assert choose_policy(costs, plain(costs)).max_tree_rows == rows


def test_higher_throughput_demands_more_likely_rows() -> None:
    costs = chain(4, 20.0)
    slow = choose_policy(costs, plain(costs))
    fast = choose_policy(costs, SpeculationCosts(5 / costs.iteration_ms(1)))
    assert fast.min_node_prob == pytest.approx(5 * slow.min_node_prob)


def test_a_draft_model_call_must_be_worth_its_time_and_costs_less_with_steps_in_flight() -> None:
    costs = chain(4, 20.0)
    cheap, expensive = (choose_policy(costs, plain(costs, level_ms=ms, model_hit_rate=0.5)) for ms in (1.0, 30.0))
    assert cheap.min_mass_blocking is not None
    assert expensive.min_mass_blocking == pytest.approx(30 * cheap.min_mass_blocking)
    assert expensive.min_mass_blocking == pytest.approx(30 / 0.5 / costs.iteration_ms(1))
    assert cheap.min_mass_idle < cheap.min_mass_blocking / 10


def test_overconfidence_contention_and_batch_sharing_make_it_conservative() -> None:
    costs = chain(4, 5.0)
    calm = choose_policy(costs, plain(costs))
    assert choose_policy(costs, plain(costs, calibration=0.5)).min_node_prob == pytest.approx(2 * calm.min_node_prob)
    assert choose_policy(costs, plain(costs, batch_sharing=2.0)).min_node_prob == pytest.approx(2 * calm.min_node_prob)
    assert choose_policy(costs, plain(costs, contention=1.6)).min_path_prob > 1.5 * calm.min_path_prob


def test_wide_steps_and_hops_of_one_machine_leave_room_for_fewer_steps() -> None:
    costs = chain(4, 20.0)
    narrow, wide = (choose_policy(costs, plain(costs, step_rows=rows)) for rows in (1.0, 16.0))
    assert wide.max_steps_in_flight < narrow.max_steps_in_flight
    assert wide.min_path_prob > narrow.min_path_prob
    shared = choose_policy(costs, plain(costs, contention=2.5))
    busy_ms = costs.bottleneck_ms(1) + 1.5 * costs.compute_ms(1)  # each other step in flight slows all hops down
    assert shared.max_steps_in_flight == -(-costs.iteration_ms(1) // busy_ms) + 1


def test_sessions_share_the_pipeline_and_pay_for_each_others_rows() -> None:
    costs = chain(4, 20.0)
    alone, four, many = (choose_policy(costs, plain(costs, level_ms=2.0, batch_sharing=n)) for n in (1.0, 4.0, 100.0))
    assert four.max_steps_in_flight == round((pipeline_depth(costs) + 1) / 4)
    assert many.max_steps_in_flight == 1
    assert four.min_node_prob == pytest.approx(4 * alone.min_node_prob)
    assert four.min_mass_blocking == pytest.approx(
        4 * alone.min_mass_blocking + costs.compute_ms(1) / costs.iteration_ms(1) / 0.5
    )


def test_batch_sharing_is_learned_from_the_hops() -> None:
    live = OnlineChainCosts(chain(3, 20.0))
    trace = ((0.0, 1.0),) * 3
    assert live.batch_sharing == 1.0
    for _ in range(20):
        live.observe(Observation(1, trace, None, active_sessions=4))
    assert live.batch_sharing == pytest.approx(4.0, rel=0.05)
    for _ in range(20):
        live.observe(Observation(1, trace, None))
    assert live.batch_sharing == pytest.approx(1.0, rel=0.05)


def test_pipeline_depth_is_the_round_trip_over_the_bottleneck() -> None:
    assert pipeline_depth(chain(3, 0.0)) == 3
    assert pipeline_depth(chain(3, 20.0)) == 23
    assert pipeline_depth(chain(3, 500.0)) == 32
    assert pipeline_depth(chain(3, 20.0), contention_ms=1e6) == 1


def seen(
    costs: ChainCosts, width: int, row_ms: float, contention: float = 1.0, *, overlapped: bool = False
) -> Observation:
    trace = tuple((0.0, contention * (stage.layers * 0.4 + row_ms * (width - 1))) for stage in costs.stages)
    return Observation(width, trace, None, overlapped)


def test_the_cost_of_rows_is_learned() -> None:
    costs = chain(3, 20.0, FLAT)
    live = OnlineChainCosts(costs)
    for width in (1, 8, 1, 6, 9, 1, 12, 8) * 3:
        live.observe(seen(costs, width, row_ms=0.5))
    assert live.now().compute_ms(1) == pytest.approx(costs.compute_ms(1), rel=0.2)
    assert live.now().compute_ms(8) == pytest.approx(costs.compute_ms(1) + 3 * 0.5 * 7, rel=0.2)


def test_contention_shows_when_steps_overlap() -> None:
    costs = chain(3, 20.0, FLAT)
    live = OnlineChainCosts(costs)
    for _ in range(30):
        live.observe(seen(costs, 1, 0.0))
        live.observe(seen(costs, 1, 0.0, contention=1.5, overlapped=True))
    assert 1.3 < live.contention < 1.6
    assert live.now().compute_ms(1) == pytest.approx(costs.compute_ms(1), rel=0.05), (
        "a step alone takes as long as ever"
    )
    for _ in range(200):
        live.observe(seen(costs, 1, 0.0))
    assert live.contention < 1.01


def test_impossible_policies_are_refused() -> None:
    for wrong in ({"min_path_prob": -0.1}, {"min_mass_blocking": -1.0}, {"min_mass_idle": -1.0}):
        with pytest.raises(UsageError):
            SpeculationPolicy(max_tree_rows=1, **wrong)  # type: ignore[arg-type]
