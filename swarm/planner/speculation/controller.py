"""The speculation controller: which strategy and policy one generation uses, by forecasts corrected by measurements.

Owns the measured throughput of one generation, the bias of each strategy's forecasts, the calibration of the drafter's
probabilities, and the current decision. Forecasts are made in `forecast`, costs estimated in `costs.online_costs`, a
pipelined tree's policy chosen in `marginal_policy`; acceptance rates are measured by the drafters. Does not know
clocks: times come with the observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.errors import UsageError
from swarm.ewma import DecayedRatio, Ewma
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.costs.online_costs import Observation, OnlineChainCosts
from swarm.planner.generation.events import SEQUENTIAL, SpeculationPolicy
from swarm.planner.speculation.forecast import (
    DrafterProfile,
    Forecast,
    Strategy,
    pipedec,
    pipelined_tree,
    sequential,
    tree,
)
from swarm.planner.speculation.marginal_policy import SpeculationCosts, choose_policy, pipeline_depth
from swarm.planner.speculation.policy import SEARCH, ControllerPolicy

DEFAULT_POLICY = ControllerPolicy()
MAX_DEPTH = SEARCH.max_in_flight  # levels of acceptance that forecasts can use


@dataclass(frozen=True, slots=True)
class Decision:
    """The strategy and policy to use, the expected throughput, and the reason."""

    strategy: Strategy
    policy: SpeculationPolicy
    tokens_per_s: float
    reason: str


class SpeculationController:
    """`on_commit` with every result, then `decide`. One a generation and chain.

    `fixed_strategy`: the one that the user asked for. With None the controller chooses between plain decoding and a
    pipelined tree, which has the others as special cases (`marginal_policy` finds the best one of them).
    """

    def __init__(
        self,
        costs: ChainCosts,
        fixed_strategy: Strategy | None = None,
        policy: ControllerPolicy = DEFAULT_POLICY,
        *,
        contention: float = 1.0,
    ) -> None:
        """`contention`: of the chain, as measured by earlier generations (`OnlineChainCosts`)."""
        if not policy.widths or min(policy.widths) < 1:
            raise UsageError("a speculation controller needs widths of at least 1")
        self._costs = OnlineChainCosts(costs, contention)
        self._fixed_strategy = fixed_strategy
        self._policy = policy
        self._forecast_bias = {strategy: _ForecastBias(policy) for strategy in Strategy}
        self._current: Decision | None = None
        self._tokens_since_choice = 0
        self._reconsider_after = policy.first_review_tokens
        prior = policy.calibration_prior_tokens
        self._calibration = DecayedRatio(prior, prior)  # accepted over expected drafts
        self._throughput = _Throughput(costs.iteration_ms(1), policy.throughput_iterations)
        self._iteration_ms_at_choice = costs.iteration_ms(1)  # of a plain step, as estimated then
        self._step_rows = Ewma(policy.step_rows_decay, 1.0)

    @property
    def calibration(self) -> float:
        """Accepted drafts over those that the drafter's probabilities predict; below 1 it is overconfident."""
        return self._calibration.value

    @property
    def contention(self) -> float:
        return self._costs.contention

    @property
    def costs(self) -> ChainCosts:
        """As measured."""
        return self._costs.now()

    @property
    def tokens_per_ms(self) -> float:
        """At which tokens came lately."""
        return self._throughput.tokens_per_ms

    def on_commit(
        self, seen: Observation, tokens: int, accepted: int, expected_accepted: float, took_ms: float
    ) -> None:
        """`tokens` came `took_ms` after those before; `accepted` of them were drafts, `expected_accepted` predicted."""
        self._costs.observe(seen)
        self._step_rows.update(min(seen.width, SEARCH.widths[-1]))
        self._calibration.add(accepted, expected_accepted, self._policy.calibration_decay)
        self._tokens_since_choice += tokens
        iteration_ms = self._costs.now().iteration_ms(1)
        self._throughput.add(tokens, took_ms, iteration_ms)
        if self._current is not None:  # a chain slower than estimated is no bias of the strategy's forecast
            expected_per_s = self._current.tokens_per_s * self._iteration_ms_at_choice / iteration_ms
            self._forecast_bias[self._current.strategy].add(tokens, expected_per_s * took_ms / 1e3)

    def decide(self, drafter: DrafterProfile) -> Decision:
        """What to use now. The strategy is chosen again from time to time, a pipelined tree's policy every time."""
        if self._current is not None and self._tokens_since_choice < self._reconsider_after:
            if self._current.strategy is Strategy.PIPELINED_TREE:
                self._current = replace(self._current, policy=self._marginal_policy(self._costs.now(), drafter))
            return self._current
        self._tokens_since_choice = 0
        costs = self._costs.now()
        forecasts = [f for f in self._forecasts(costs, drafter) if f is not None]
        if not forecasts:
            forecasts = [sequential(costs)]
        ranked = sorted(forecasts, key=lambda f: -self._corrected_rate(f))
        best = _as_pipelined_tree(ranked[0]) if self._fixed_strategy is None else ranked[0]
        kept = self._current_forecast(ranked)
        if kept is not None and self._corrected_rate(best) <= self._corrected_rate(kept) * (1 + self._policy.min_gain):
            best = kept
        for strategy, bias in self._forecast_bias.items():
            if strategy is not best.strategy:
                bias.recover()
        same = self._current is not None and best.strategy is self._current.strategy
        first, most = self._policy.first_review_tokens, self._policy.max_review_tokens
        self._reconsider_after = min(most, 2 * self._reconsider_after) if same else first
        self._current = self._as_decision(best, ranked, costs, drafter)
        self._iteration_ms_at_choice = costs.iteration_ms(1)
        return self._current

    def _current_forecast(self, ranked: Sequence[Forecast]) -> Forecast | None:
        """The forecast of the strategy in use."""
        if self._current is None:
            return None
        candidates = ranked if self._fixed_strategy is not None else [_as_pipelined_tree(f) for f in ranked]
        return next((f for f in candidates if f.strategy is self._current.strategy), None)

    def _forecasts(self, costs: ChainCosts, drafter: DrafterProfile) -> list[Forecast | None]:
        acceptance, typical, widths = tuple(drafter.acceptance), self._policy.typical_depth, self._policy.widths
        usual = replace(drafter, acceptance=acceptance[:typical])
        deep = replace(drafter, acceptance=acceptance[: max(typical, min(MAX_DEPTH, pipeline_depth(costs) + 1))])
        forecast: dict[Strategy, Callable[[], Forecast | None]] = {
            Strategy.SEQUENTIAL: lambda: sequential(costs),
            Strategy.TREE: lambda: tree(costs, usual, widths),
            Strategy.PIPEDEC: lambda: pipedec(costs, deep, widths),
            Strategy.PIPELINED_TREE: lambda: pipelined_tree(costs, usual, widths),
        }
        return [make() for strategy, make in forecast.items() if self._fixed_strategy in (None, strategy)]

    def _corrected_rate(self, forecast: Forecast) -> float:
        """Tokens/s, forecast times the strategy's measured bias."""
        strategy = forecast.strategy if self._fixed_strategy is not None else _as_pipelined_tree(forecast).strategy
        return forecast.tokens_per_s * self._forecast_bias[strategy].ratio

    def _as_decision(
        self, best: Forecast, ranked: Sequence[Forecast], costs: ChainCosts, drafter: DrafterProfile
    ) -> Decision:
        others = "; ".join(f"{f.strategy} {self._corrected_rate(f):.1f}" for f in ranked if f.reason != best.reason)
        reason = f"{best.strategy}, about {self._corrected_rate(best):.1f} tokens/s: {best.reason}"
        if best.strategy is Strategy.PIPELINED_TREE:
            policy = self._marginal_policy(costs, drafter)
        else:
            always = self._fixed_strategy is None
            policy = policy_of(best, costs, self.calibration, self._policy, speculate_anyway=always)
        return Decision(best.strategy, policy, best.tokens_per_s, f"{reason} ({others})" if others else reason)

    def _marginal_policy(self, costs: ChainCosts, drafter: DrafterProfile) -> SpeculationPolicy:
        spec = SpeculationCosts(
            self._throughput.tokens_per_ms,
            drafter.level_ms,
            drafter.model_hit_rate,
            self.calibration,
            self._costs.contention,
            self._costs.batch_sharing,
            self._step_rows.value,
        )
        return choose_policy(costs, spec)


class _ForecastBias:
    """How a strategy's forecasts came true: tokens committed over tokens forecast for the same time.

    Both are summed before they are divided, for tokens come in bursts with waits between them.
    """

    def __init__(self, policy: ControllerPolicy) -> None:
        self._policy = policy
        prior = 1.0 / (1.0 - policy.bias_decay)
        self._tokens = DecayedRatio(prior, prior)

    @property
    def ratio(self) -> float:
        return self._tokens.value

    def add(self, tokens: int, forecast: float) -> None:
        self._tokens.add(tokens, forecast, self._policy.bias_decay**tokens)

    def recover(self) -> None:
        """Undo a part of the bias: a strategy not in use gets another chance in time."""
        self._tokens.numerator += self._policy.bias_recovery * (self._tokens.denominator - self._tokens.numerator)


class _Throughput:
    """Recent tokens a millisecond. The prior is plain decoding."""

    def __init__(self, iteration_ms: float, iterations: float) -> None:
        self._iterations = iterations
        self._tokens = DecayedRatio(iterations, iterations * iteration_ms)

    @property
    def tokens_per_ms(self) -> float:
        return self._tokens.value

    def add(self, tokens: int, took_ms: float, iteration_ms: float) -> None:
        self._tokens.add(tokens, took_ms, math.exp(-took_ms / (self._iterations * iteration_ms)))


def _as_pipelined_tree(forecast: Forecast) -> Forecast:
    """A pipelined tree does at least as well as any other speculative strategy."""
    return forecast if forecast.strategy is Strategy.SEQUENTIAL else replace(forecast, strategy=Strategy.PIPELINED_TREE)


def policy_of(
    forecast: Forecast,
    costs: ChainCosts,
    calibration: float = 1.0,
    tuning: ControllerPolicy = DEFAULT_POLICY,
    *,
    speculate_anyway: bool = False,
) -> SpeculationPolicy:
    """The policy that runs a forecast. `calibration`: accepted drafts over expected ones.

    A node accepted with probability p adds p tokens to a step and its row's time to it, so it is worth its row if p is
    above tokens/iteration times that time. Drafts better than the drafter's average thus get more rows than the
    forecast's mean tree, worse ones fewer; with `speculate_anyway` even a sequential forecast sends the most confident
    drafts.
    """
    wide = max(2, forecast.width, 8 if forecast.strategy is Strategy.SEQUENTIAL else 0)
    row_ms = (costs.iteration_ms(wide) - costs.iteration_ms(1)) / (wide - 1)
    min_prob = forecast.tokens_per_iteration * row_ms / forecast.iteration_ms / max(tuning.min_calibration, calibration)
    match forecast.strategy:
        case Strategy.SEQUENTIAL if not speculate_anyway:
            return SEQUENTIAL
        case Strategy.SEQUENTIAL:
            return SpeculationPolicy(
                max_tree_rows=8,
                max_depth_per_step=8,
                min_node_prob=min(1.0, 1.5 * min_prob),
                min_mass_blocking=math.inf,
                min_mass_idle=math.inf,
            )
        case Strategy.PIPEDEC:
            return SpeculationPolicy(
                max_tree_rows=forecast.width,
                max_depth_per_step=1,
                max_steps_in_flight=forecast.in_flight,
                min_node_prob=min(0.5, min_prob / 4),
            )
        case _:
            rows = round(tuning.tree_rows_margin * (forecast.width - 1))
            return SpeculationPolicy(
                max_tree_rows=min(48, max(4, rows)),
                max_depth_per_step=max(4, forecast.depth),
                min_node_prob=min(1.0, min_prob),
            )
