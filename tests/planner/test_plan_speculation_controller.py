"""Decisions follow measurements: costs, the drafter's calibration, and the bias of forecasts."""

from __future__ import annotations

import pytest

from swarm.errors import UsageError
from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.costs.online_costs import Observation, OnlineChainCosts
from swarm.planner.generation.events import SEQUENTIAL
from swarm.planner.speculation.controller import (
    DEFAULT_POLICY,
    SpeculationController,
    _ForecastBias,
    policy_of,
)
from swarm.planner.speculation.forecast import (
    DrafterProfile,
    Strategy,
    sequential,
    tree,
)
from swarm.planner.speculation.policy import ControllerPolicy
from swarm.types import CostCurve

CURVE = CostCurve((1, 2, 4, 8, 16, 32), (0.4, 0.42, 0.48, 0.6, 0.9, 1.5))
REVIEW_TOKENS = DEFAULT_POLICY.first_review_tokens
GOOD = ((0.7, 0.1, 0.05),) * 8
POOR = ((0.02, 0.01),) * 8


def chain(hops: int, link_ms: float) -> ChainCosts:
    return ChainCosts(tuple(Stage(30 // hops, CURVE.ms_at(1), CURVE) for _ in range(hops)), (link_ms,) * (hops + 1))


def observed(costs: ChainCosts, width: int, slow: float = 1.0, queue_ms: float = 0.0) -> Observation:
    trace = tuple((queue_ms, stage.layers * stage.cost.ms_at(width) * slow) for stage in costs.stages)
    inside = sum(queue + compute for queue, compute in trace)
    return Observation(width, trace, inside + costs.links_ms(width))


def test_costs_move_to_what_is_measured() -> None:
    predicted = chain(3, 20.0)
    true = chain(3, 5.0)
    live = OnlineChainCosts(predicted)
    assert live.now() == predicted
    for _ in range(40):
        live.observe(observed(true, 4, slow=3.0, queue_ms=2.0))
    now = live.now()
    assert now.links_ms(1) == pytest.approx(true.links_ms(1), rel=0.01)
    assert now.compute_ms(4) == pytest.approx(3 * true.compute_ms(4) + 6.0, rel=0.01)
    live.observe(Observation(4, ((0.0, 1e6),), 1e6))
    assert live.now() == now, "a trace of another chain is ignored"


def test_overlapping_steps_do_not_change_the_links() -> None:
    live = OnlineChainCosts(chain(2, 20.0))
    live.observe(Observation(1, ((0.0, 6.0), (0.0, 6.0)), None))
    assert live.now().link_ms == chain(2, 20.0).link_ms


def test_slow_links_and_good_drafts_make_it_speculate_and_poor_ones_do_not() -> None:
    assert SpeculationController(chain(4, 20.0)).decide(DrafterProfile(GOOD)).strategy is not Strategy.SEQUENTIAL
    quiet = SpeculationController(chain(1, 0.1)).decide(DrafterProfile(POOR))
    assert quiet.strategy is Strategy.SEQUENTIAL
    assert quiet.policy.min_node_prob > 0.02, "only the most confident drafts are worth such an expensive row"


@pytest.mark.parametrize("only", list(Strategy))
def test_a_fixed_strategy_is_kept(only: Strategy) -> None:
    controller = SpeculationController(chain(4, 20.0), only)
    decision = controller.decide(DrafterProfile(GOOD))
    assert decision.strategy is only
    shape = {Strategy.SEQUENTIAL: (False, False), Strategy.TREE: (True, False)}
    assert (decision.policy.max_tree_rows > 0, decision.policy.max_steps_in_flight > 1) == shape.get(only, (True, True))


def test_a_strategy_with_a_wrong_forecast_is_left_in_time() -> None:
    costs = chain(4, 20.0)
    controller = SpeculationController(costs)
    first = controller.decide(DrafterProfile(GOOD))
    assert first.strategy is not Strategy.SEQUENTIAL
    for _ in range(400):
        controller.on_commit(observed(costs, 8), 1, 0, 0.0, 5 * costs.iteration_ms(1))
        if controller.decide(DrafterProfile(GOOD)).strategy is Strategy.SEQUENTIAL:
            break
    assert controller.decide(DrafterProfile(GOOD)).strategy is Strategy.SEQUENTIAL


def test_a_chain_slower_than_predicted_is_no_forecast_bias() -> None:
    predicted = chain(4, 1.0)
    slow = CostCurve(CURVE.widths, tuple(3 * ms for ms in CURVE.ms))
    true = ChainCosts(tuple(Stage(s.layers, slow.ms_at(1), slow) for s in predicted.stages), (3.0,) * 5)
    controller, knowing = SpeculationController(predicted), SpeculationController(true).decide(DrafterProfile(GOOD))
    first = controller.decide(DrafterProfile(GOOD))
    assert first.strategy is knowing.strategy is Strategy.PIPELINED_TREE
    assert first.tokens_per_s > 2 * knowing.tokens_per_s
    for _ in range(REVIEW_TOKENS // 3):
        controller.on_commit(observed(true, 8), 3, 2, 2.0, 3e3 / knowing.tokens_per_s)
    assert controller._forecast_bias[Strategy.PIPELINED_TREE].ratio == pytest.approx(1.0, abs=0.15)
    assert controller.decide(DrafterProfile(GOOD)).tokens_per_s == pytest.approx(knowing.tokens_per_s, rel=0.2)


def test_it_keeps_its_strategy_between_two_reviews() -> None:
    controller = SpeculationController(chain(4, 20.0))
    first = controller.decide(DrafterProfile(GOOD))
    controller.on_commit(observed(chain(4, 20.0), 1), REVIEW_TOKENS - 1, 0, 0.0, 10.0)
    second = controller.decide(DrafterProfile(POOR))
    assert (second.strategy, second.reason) == (first.strategy, first.reason)
    controller.on_commit(observed(chain(4, 20.0), 1), 1, 0, 0.0, 10.0)
    assert controller.decide(DrafterProfile(POOR)).reason != first.reason


def test_an_overconfident_drafter_needs_higher_probabilities() -> None:
    costs = chain(2, 1.0)
    forecast = tree(costs, DrafterProfile(GOOD))
    assert forecast is not None
    controller = SpeculationController(costs, Strategy.TREE)
    for _ in range(200):
        controller.on_commit(observed(costs, 8), 1, 0, 2.0, 10.0)
    assert controller.calibration < 0.1
    assert (
        policy_of(forecast, costs, controller.calibration).min_node_prob > 3 * policy_of(forecast, costs).min_node_prob
    )
    assert policy_of(sequential(costs), costs) == SEQUENTIAL


def test_widths_are_checked() -> None:
    with pytest.raises(UsageError):
        SpeculationController(chain(2, 1.0), policy=ControllerPolicy(widths=()))


def test_forecast_bias_is_tokens_over_time_and_not_the_mean_of_bursts() -> None:
    """Three tokens in 10 ms, then one in 140, again and again, where 20 a second were forecast."""
    record = _ForecastBias(DEFAULT_POLICY)
    for _ in range(60):
        record.add(3, 20 * 0.01)
        record.add(0, 20 * 0.07)
        record.add(1, 20 * 0.07)
    assert record.ratio == pytest.approx(4 / (20 * 0.15), rel=0.1)
    before = record.ratio
    record.recover()
    assert record.ratio == pytest.approx(before + DEFAULT_POLICY.bias_recovery * (1 - before))
