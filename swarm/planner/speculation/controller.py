"""Which setting one generation uses from here on: predicted from the live map, corrected by what is measured.

Owns the memory of one generation's speed (at what pace tokens come, how fast each strategy was, how far the drafter's
own odds can be trusted) and the setting in use. The predictions are `plan.speculation`'s, the costs `live_costs`', and
what a row or a question must bring is `marginal`'s to say; acceptance is measured where the drafts are made. Knows no
clocks: times come with the observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.errors import UsageError
from swarm.ewma import DecayedRatio
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.costs.online_costs import Observation, OnlineChainCosts
from swarm.planner.generation.events import SEQUENTIAL, SpeculationPolicy
from swarm.planner.speculation.forecast import (
    MAX_IN_FLIGHT,
    DrafterProfile,
    Forecast,
    Strategy,
    pipedec,
    pipelined_tree,
    sequential,
    tree,
)
from swarm.planner.speculation.marginal_policy import SpeculationCosts, choose_policy, pipeline_depth

BIAS_DECAY = 0.92  # what a strategy's speed before the last token weighs
TRUST_DECAY = 0.99  # what the drafter's odds before the last result weigh
PACE_ROUNDS = 4.0  # rounds of the chain after which a pace is forgotten to a third
TRUST_AFTER = 4.0  # guesses' worth of belief in the drafter's odds before any was settled
RECHOOSE_TOKENS = 12  # until the strategy is chosen afresh; twice as long each time that changes nothing,
RECHOOSE_AT_LEAST = 48  # up to here
MARGIN = 0.08  # another strategy must promise so much more before a generation changes its mind
BIAS_RECOVERY = 0.3  # a strategy that disappointed is forgiven so much with every choice of another
WIDTHS = (1, 2, 4, 8, 16, 32)
MAX_DEPTH = MAX_IN_FLIGHT  # levels of acceptance looked at,
USUAL_DEPTH = 12  # and how many where no more fit into the chain
SPARE_ROWS = 3.0  # times the mean tree: room for the steps whose guesses are better than most


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do from here on, how fast it should be, and why."""

    strategy: Strategy
    policy: SpeculationPolicy
    tokens_per_s: float
    reason: str


class SpeculationController:
    """`settled` with every result, then `setting` tells whether to change. One a generation and chain.

    `only`: the strategy the user asked for. None leaves the choice to the tuner: to decode plainly, or the hybrid,
    which holds the others as special cases and finds the one in place by itself (`marginal`).
    """

    def __init__(
        self,
        costs: ChainCosts,
        fixed_strategy: Strategy | None = None,
        widths: Sequence[int] = WIDTHS,
        *,
        contention: float = 1.0,
    ) -> None:
        """`crowding`: of the chain, as it was measured before (`live_costs.OnlineChainCosts`)."""
        if not widths or min(widths) < 1:
            raise UsageError("a tuner needs widths of at least 1")
        self._costs = OnlineChainCosts(costs, contention)
        self._fixed_strategy = fixed_strategy
        self._widths = tuple(widths)
        self._forecast_bias = {strategy: _ForecastBias() for strategy in Strategy}
        self._current: Decision | None = None
        self._tokens_since_choice = 0  # tokens settled since the last choice
        self._reconsider_after = RECHOOSE_TOKENS
        self._calibration = DecayedRatio(TRUST_AFTER, TRUST_AFTER)  # right guesses over promised ones
        self._throughput = _Throughput(costs.iteration_ms(1))
        self._iteration_ms_at_choice = costs.iteration_ms(1)  # a plain step's round, as it was known at the last choice

    @property
    def calibration(self) -> float:
        """Right guesses over those that the drafter's odds promised; below 1 it boasts."""
        return self._calibration.value

    @property
    def contention(self) -> float:
        return self._costs.contention

    @property
    def costs(self) -> ChainCosts:
        """As measured."""
        return self._costs.now()

    def on_commit(
        self, seen: Observation, tokens: int, accepted: int, expected_accepted: float, took_ms: float
    ) -> None:
        """`tokens` came `took_ms` after those before; `hits` were guessed, where the odds promised `expected`."""
        self._costs.observe(seen)
        self._calibration.add(accepted, expected_accepted, TRUST_DECAY)
        self._tokens_since_choice += tokens
        round_ms = self._costs.now().iteration_ms(1)
        self._throughput.add(tokens, took_ms, round_ms)
        if self._current is not None:  # a chain that is slower than was known breaks no strategy's promise
            promised = self._current.tokens_per_s * self._iteration_ms_at_choice / round_ms
            self._forecast_bias[self._current.strategy].add(tokens, promised * took_ms / 1e3)

    def decide(self, drafter: DrafterProfile) -> Decision:
        """The setting to use now. The strategy is chosen afresh from time to time, the hybrid's prices with every
        result."""
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
        if kept is not None and self._corrected_rate(best) <= self._corrected_rate(kept) * (1 + MARGIN):
            best = kept
        for strategy, record in self._forecast_bias.items():
            if strategy is not best.strategy:
                record.recover()
        same = self._current is not None and best.strategy is self._current.strategy
        self._reconsider_after = min(RECHOOSE_AT_LEAST, 2 * self._reconsider_after) if same else RECHOOSE_TOKENS
        self._current, self._iteration_ms_at_choice = (
            self._as_decision(best, ranked, costs, drafter),
            costs.iteration_ms(1),
        )
        return self._current

    def _current_forecast(self, ranked: Sequence[Forecast]) -> Forecast | None:
        """What is to be expected of the strategy in use."""
        if self._current is None:
            return None
        candidates = ranked if self._fixed_strategy is not None else [_as_pipelined_tree(f) for f in ranked]
        return next((f for f in candidates if f.strategy is self._current.strategy), None)

    def _forecasts(self, costs: ChainCosts, drafter: DrafterProfile) -> list[Forecast | None]:
        acceptance = tuple(drafter.acceptance)
        usual = replace(drafter, acceptance=acceptance[:USUAL_DEPTH])
        deep = replace(drafter, acceptance=acceptance[: max(USUAL_DEPTH, min(MAX_DEPTH, pipeline_depth(costs) + 1))])
        forecast: dict[Strategy, Callable[[], Forecast | None]] = {
            Strategy.SEQUENTIAL: lambda: sequential(costs),
            Strategy.TREE: lambda: tree(costs, usual, self._widths),
            Strategy.PIPEDEC: lambda: pipedec(costs, deep, self._widths),
            Strategy.PIPELINED_TREE: lambda: pipelined_tree(costs, usual, self._widths),
        }
        return [make() for strategy, make in forecast.items() if self._fixed_strategy in (None, strategy)]

    def _corrected_rate(self, forecast: Forecast) -> float:
        """Tokens/s, by the prediction and by how predictions of this strategy have come true."""
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
            policy = policy_of(best, costs, self.calibration, speculate_anyway=self._fixed_strategy is None)
        return Decision(best.strategy, policy, best.tokens_per_s, f"{reason} ({others})" if others else reason)

    def _marginal_policy(self, costs: ChainCosts, drafter: DrafterProfile) -> SpeculationPolicy:
        live = self._costs
        pace = self._throughput.tokens_per_ms
        prices = SpeculationCosts(
            pace, drafter.level_ms, drafter.model_hit_rate, self.calibration, live.contention, live.batch_sharing
        )
        return choose_policy(costs, prices)


class _ForecastBias:
    """How a strategy's predictions have come true: tokens that came over those that were promised for the same time.

    Both are summed before they are divided, for tokens come in bursts with waits between them.
    """

    def __init__(self) -> None:
        self._tokens = DecayedRatio(1.0 / (1.0 - BIAS_DECAY), 1.0 / (1.0 - BIAS_DECAY))

    @property
    def ratio(self) -> float:
        return self._tokens.value

    def add(self, accepted: int, promised: float) -> None:
        self._tokens.add(accepted, promised, BIAS_DECAY**accepted)

    def recover(self) -> None:
        self._tokens.numerator += BIAS_RECOVERY * (self._tokens.denominator - self._tokens.numerator)


class _Throughput:
    """Tokens a millisecond, lately. Before any came: as plain decoding."""

    def __init__(self, round_ms: float) -> None:
        self._tokens = DecayedRatio(PACE_ROUNDS, PACE_ROUNDS * round_ms)

    @property
    def tokens_per_ms(self) -> float:
        return self._tokens.value

    def add(self, tokens: int, took_ms: float, round_ms: float) -> None:
        self._tokens.add(tokens, took_ms, math.exp(-took_ms / (PACE_ROUNDS * round_ms)))


def _as_pipelined_tree(forecast: Forecast) -> Forecast:
    """The hybrid does at least as well as any other that guesses."""
    return forecast if forecast.strategy is Strategy.SEQUENTIAL else replace(forecast, strategy=Strategy.PIPELINED_TREE)


def policy_of(
    forecast: Forecast, costs: ChainCosts, calibration: float = 1.0, *, speculate_anyway: bool = False
) -> SpeculationPolicy:
    """The policy that runs a forecast. `trust`: right guesses over promised ones.

    A node that is right with probability p adds p tokens to a step and its row's time to it, so it is worth its row if
    p is above tokens/period times that time: the floor. Guesses better than the drafter's average thus get more rows
    than the forecast's mean tree, worse ones fewer; with `guess_anyway` even a sequential forecast sends the guesses
    that are nearly sure.
    """
    wide = max(2, forecast.width, 8 if forecast.strategy is Strategy.SEQUENTIAL else 0)
    row_ms = (costs.iteration_ms(wide) - costs.iteration_ms(1)) / (wide - 1)
    floor = forecast.tokens_per_iteration * row_ms / forecast.iteration_ms / max(0.05, calibration)
    match forecast.strategy:
        case Strategy.SEQUENTIAL if not speculate_anyway:
            return SEQUENTIAL
        case Strategy.SEQUENTIAL:
            return SpeculationPolicy(
                max_tree_rows=8,
                max_depth_per_step=8,
                min_node_prob=min(1.0, 1.5 * floor),
                min_mass_blocking=math.inf,
                min_mass_idle=math.inf,
            )
        case Strategy.PIPEDEC:
            return SpeculationPolicy(
                max_tree_rows=forecast.width,
                max_depth_per_step=1,
                max_steps_in_flight=forecast.in_flight,
                min_node_prob=min(0.5, floor / 4),
            )
        case _:
            rows = round(SPARE_ROWS * (forecast.width - 1))
            return SpeculationPolicy(
                max_tree_rows=min(48, max(4, rows)),
                max_depth_per_step=max(4, forecast.depth),
                min_node_prob=min(1.0, floor),
            )
