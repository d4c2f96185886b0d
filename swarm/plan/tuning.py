"""Which setting one generation uses from here on: predicted from the live map, corrected by what is measured.

Owns the memory of one generation's measurements (what hops and links took, how fast each strategy was, how far the
drafter's own odds can be trusted) and the setting in use. The predictions are `plan.speculation`'s; acceptance is
measured where the drafts are made. Knows no clocks: times come with the observations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.errors import UsageError
from swarm.plan.session_events import SEQUENTIAL, Policy
from swarm.plan.speculation import ChainCosts, Drafter, Forecast, Stage, Strategy, pipelined, sequential, tree
from swarm.types import CostCurve

MEMORY = 0.8  # what the measurements before the last one weigh together
RATE_MEMORY = 0.92  # the same for a strategy's speed, a token
PROVEN_TOKENS = 16  # settled before a strategy is chosen whose misses stop the whole pipeline
TRUST_AFTER = 4.0  # guesses' worth of belief in the drafter's odds before any was settled
RECHOOSE_TOKENS = 12
MARGIN = 0.08  # another strategy must promise so much more before a generation changes its mind
WIDTHS = (1, 2, 4, 8, 16, 32)
MAX_DEPTH = 12  # levels of acceptance looked at
SPARE_ROWS = 3.0  # times the mean tree: room for the steps whose guesses are better than most


@dataclass(frozen=True, slots=True)
class Observation:
    """One settled step: `width` rows it had, `trace` of (queue ms, compute ms) a hop, `round_ms` from send to result.

    `round_ms` is None when other steps were under way, whose time is in it too.
    """

    width: int
    trace: tuple[tuple[float, float], ...]
    round_ms: float | None


class LiveCosts:
    """A chain's costs: the live map's to begin with, then scaled to what this generation sees."""

    def __init__(self, predicted: ChainCosts) -> None:
        self._predicted = predicted
        self._scale = [1.0] * len(predicted.stages)  # measured compute over predicted
        self._queue_ms = [0.0] * len(predicted.stages)
        self._links_ms: float | None = None  # all of a round's

    def observe(self, seen: Observation) -> None:
        """A trace of another chain's length is passed over."""
        if len(seen.trace) != len(self._scale):
            return
        for i, ((queue, compute), stage) in enumerate(zip(seen.trace, self._predicted.stages, strict=True)):
            expected = stage.layers * stage.cost.at(seen.width)
            if expected > 0:
                self._scale[i] = _blend(self._scale[i], compute / expected)
            self._queue_ms[i] = _blend(self._queue_ms[i], queue)
        if seen.round_ms is not None:
            links = max(0.0, seen.round_ms - sum(queue + compute for queue, compute in seen.trace))
            self._links_ms = links if self._links_ms is None else _blend(self._links_ms, links)

    def now(self) -> ChainCosts:
        costs = self._predicted
        stages = tuple(
            _scaled(stage, scale, queue)
            for stage, scale, queue in zip(costs.stages, self._scale, self._queue_ms, strict=True)
        )
        if self._links_ms is None:
            return replace(costs, stages=stages)
        total = sum(costs.link_ms)
        shares = [ms / total if total > 0 else 1 / len(costs.link_ms) for ms in costs.link_ms]
        return replace(costs, stages=stages, link_ms=tuple(self._links_ms * share for share in shares))


def _blend(before: float, now: float) -> float:
    return MEMORY * before + (1 - MEMORY) * now


def _scaled(stage: Stage, scale: float, queue_ms: float) -> Stage:
    cost = CostCurve(stage.cost.widths, tuple(ms * scale for ms in stage.cost.ms))
    return Stage(stage.layers, cost.at(1) + queue_ms / stage.layers, cost)


@dataclass(frozen=True, slots=True)
class Setting:
    """What to do from here on, how fast it should be, and why."""

    strategy: Strategy
    policy: Policy
    tokens_per_s: float
    reason: str


class Tuner:
    """`settled` with every result, then `setting` tells whether to change. One a generation and chain.

    `only`: the strategy the user asked for; None lets the tuner choose.
    """

    def __init__(self, costs: ChainCosts, only: Strategy | None = None, widths: Sequence[int] = WIDTHS) -> None:
        if not widths or min(widths) < 1:
            raise UsageError("a tuner needs widths of at least 1")
        self._costs = LiveCosts(costs)
        self._only = only
        self._widths = tuple(widths)
        self._rates: dict[Strategy, float] = {}  # measured over predicted speed
        self._current: Setting | None = None
        self._since = 0  # tokens settled since the last choice
        self._total = 0
        self._expected = TRUST_AFTER
        self._hits = TRUST_AFTER

    @property
    def trust(self) -> float:
        """Right guesses over those that the drafter's odds promised; below 1 it boasts."""
        return self._hits / self._expected

    def settled(self, seen: Observation, tokens: int, hits: int, expected: float, took_ms: float) -> None:
        """`tokens` came `took_ms` after those before; `hits` were guessed, where the odds promised `expected`."""
        self._costs.observe(seen)
        self._hits, self._expected = self._hits * 0.99 + hits, self._expected * 0.99 + expected
        self._since += tokens
        self._total += tokens
        if self._current is not None and tokens and took_ms > 0 and self._current.tokens_per_s > 0:
            strategy = self._current.strategy
            ratio = min(4.0, tokens * 1000 / took_ms / self._current.tokens_per_s)
            memory = RATE_MEMORY**tokens
            self._rates[strategy] = memory * self._rates.get(strategy, 1.0) + (1 - memory) * ratio

    def setting(self, drafter: Drafter) -> Setting:
        """The setting to use now. Chosen afresh every RECHOOSE_TOKENS tokens."""
        if self._current is not None and self._since < RECHOOSE_TOKENS:
            return self._current
        self._since = 0
        costs = self._costs.now()
        drafter = replace(drafter, acceptance=tuple(drafter.acceptance)[:MAX_DEPTH])
        forecasts = [f for f in self._forecasts(costs, drafter) if f is not None]
        if not forecasts:
            forecasts = [sequential(costs)]
        ranked = sorted(forecasts, key=lambda f: -self._promise(f))
        best = ranked[0]
        kept = next((f for f in ranked if self._current and f.strategy is self._current.strategy), None)
        if kept is not None and self._promise(best) <= self._promise(kept) * (1 + MARGIN):
            best = kept
        self._current = self._as_setting(best, ranked, costs)
        return self._current

    def _forecasts(self, costs: ChainCosts, drafter: Drafter) -> list[Forecast | None]:
        forecast: dict[Strategy, Callable[[], Forecast | None]] = {
            Strategy.SEQUENTIAL: lambda: sequential(costs),
            Strategy.TREE: lambda: tree(costs, drafter, self._widths),
            Strategy.PIPELINED: lambda: pipelined(costs, drafter, self._widths),
        }
        if self._total < PROVEN_TOKENS and self._only is None:
            del forecast[Strategy.PIPELINED]  # acceptance is a guess as yet, and a miss there costs the most
        return [make() for strategy, make in forecast.items() if self._only in (None, strategy)]

    def _promise(self, forecast: Forecast) -> float:
        """Tokens/s, by the prediction and by how predictions of this strategy have come true."""
        return forecast.tokens_per_s * self._rates.get(forecast.strategy, 1.0)

    def _as_setting(self, best: Forecast, ranked: Sequence[Forecast], costs: ChainCosts) -> Setting:
        others = "; ".join(f"{f.strategy} {self._promise(f):.1f}" for f in ranked if f is not best)
        reason = f"{best.strategy}, about {self._promise(best):.1f} tokens/s: {best.reason}"
        return Setting(
            best.strategy,
            policy_of(best, costs, self.trust, guess_anyway=self._only is None),
            best.tokens_per_s,
            f"{reason} ({others})" if others else reason,
        )


def policy_of(forecast: Forecast, costs: ChainCosts, trust: float = 1.0, *, guess_anyway: bool = False) -> Policy:
    """The policy that runs a forecast. `trust`: right guesses over promised ones.

    A node that is right with probability p adds p tokens to a step and its row's time to it, so it is worth its row if
    p is above tokens/period times that time: the floor. Guesses better than the drafter's average thus get more rows
    than the forecast's mean tree, worse ones fewer; with `guess_anyway` even a sequential forecast sends the guesses
    that are nearly sure.
    """
    wide = max(2, forecast.width, 8 if forecast.strategy is Strategy.SEQUENTIAL else 0)
    row_ms = (costs.round_ms(wide) - costs.round_ms(1)) / (wide - 1)
    floor = forecast.tokens * row_ms / forecast.period_ms / max(0.05, trust)
    match forecast.strategy:
        case Strategy.SEQUENTIAL if not guess_anyway:
            return SEQUENTIAL
        case Strategy.SEQUENTIAL:
            return Policy(rows=8, levels=8, floor=min(1.0, 1.5 * floor))
        case Strategy.TREE:
            rows = round(SPARE_ROWS * (forecast.width - 1))
            return Policy(rows=min(48, max(4, rows)), levels=max(4, forecast.depth), floor=min(1.0, floor))
        case Strategy.PIPELINED:
            return Policy(rows=forecast.width, levels=1, in_flight=forecast.in_flight, floor=min(0.5, floor / 4))
