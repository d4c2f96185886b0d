"""Forecasts of tokens/s for each decoding strategy, tree width and depth on a chain, and the choice of the fastest.

ARCA's choice (Ghidorah §III-C: a measured cost curve against the acceptance of each width), extended by what a chain
adds: the links' time, which makes wide trees cheap, and its hops, which PipeDec (§2.4) keeps busy with one tree level
each. Owns the forecasts and the choice. Does not know how costs and acceptance were measured or how a strategy runs.

Forecasts are expectations over the acceptance table and leave out what all strategies share (sampling, the client's
own work). They rank settings; the controller corrects them by measured throughput.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from swarm.errors import UsageError
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.speculation.policy import SEARCH
from swarm.planner.speculation.static_tree import (
    AcceptanceTable,
    TreeShape,
    best_nodes,
    best_shape,
    check_acceptance,
    expected_tokens,
)
from swarm.planner.speculation.tree_forecast import LevelForecast, expected_run, forecast_levels


class Strategy(enum.StrEnum):
    """The decoding strategies: special cases of a `SpeculationPolicy`."""

    SEQUENTIAL = "sequential"
    TREE = "tree"
    PIPEDEC = "pipedec"
    PIPELINED_TREE = "pipelined-tree"  # trees, several of them in flight

    @classmethod
    def _missing_(cls, value: object) -> Strategy | None:
        """Deprecated names, accepted for one release."""
        return {"pipelined": cls.PIPEDEC, "hybrid": cls.PIPELINED_TREE}.get(str(value))


@dataclass(frozen=True, slots=True)
class DrafterProfile:
    """A drafter's accuracy and speed. `acceptance[depth][rank]` as in `static_tree`; no deeper level is drafted.

    `level_ms`: drafting one more level, which needs the level above; `round_ms`: once a step, whatever the depth.
    `model_hit_rate`: how often a draft-model call proposes the target's token. `uncertain_fraction`: the part of all
    positions for which it reports low confidence; pipelined trees can use that, the one shape of a static tree cannot.
    """

    acceptance: AcceptanceTable
    level_ms: float = 0.0
    round_ms: float = 0.0
    model_hit_rate: float = 0.5
    uncertain_fraction: float = 1.0

    def __post_init__(self) -> None:
        check_acceptance(self.acceptance)
        if not all(0 <= x < math.inf for x in (self.level_ms, self.round_ms)):
            raise UsageError("a drafter's times must be finite and not negative")
        wrong = max((1 - row[0] for row in self.acceptance if row), default=0.0)
        if not 0 < self.uncertain_fraction <= 1 or wrong > self.uncertain_fraction + 1e-9:
            raise UsageError(
                f"a drafter is wrong at {wrong:g} of all positions, and uncertain at {self.uncertain_fraction:g} only"
            )


@dataclass(frozen=True, slots=True)
class Forecast:
    """One setting and its expected throughput.

    `width`: rows a step (a tree's with its root, a pipelined level's without). `depth`: levels drafted ahead.
    `tokens_per_iteration`: committed in a round trip, or in a run up to the next miss if pipelined; `iteration_ms`: the
    time of that.
    """

    strategy: Strategy
    width: int
    depth: int
    in_flight: int
    tokens_per_iteration: float
    iteration_ms: float
    reason: str
    shape: TreeShape = field(default_factory=TreeShape)

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens_per_iteration / self.iteration_ms


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting to use, the best of each strategy (fastest first), and the reason."""

    best: Forecast
    forecasts: tuple[Forecast, ...]
    reason: str


def choose(
    costs: ChainCosts,
    drafter: DrafterProfile,
    *,
    widths: Sequence[int] = SEARCH.widths,
    max_in_flight: int = SEARCH.max_in_flight,
    current: Strategy | None = None,
    margin: float = 0.05,
) -> Choice:
    """The fastest setting on this chain with this drafter. On ties the simpler strategy, then the narrower step.

    `current`: the strategy in use, kept unless another is faster by more than the fraction `margin`: hysteresis
    against noise in the measurements.
    """
    if not widths or min(widths) < 1 or max_in_flight < 1 or margin < 0:
        raise UsageError("widths and max_in_flight are at least 1, margin at least 0")
    forecasts = [
        sequential(costs),
        tree(costs, drafter, widths),
        pipedec(costs, drafter, widths, max_in_flight),
        pipelined_tree(costs, drafter, widths, max_in_flight),
    ]
    ranked = sorted((f for f in forecasts if f is not None), key=lambda f: -f.tokens_per_s)
    best = ranked[0]
    kept = next((f for f in ranked if f.strategy is current), None)
    if kept is not None and best.tokens_per_s <= kept.tokens_per_s * (1 + margin):
        best = kept
    return Choice(best, tuple(ranked), _why(best, ranked, costs))


def sequential(costs: ChainCosts) -> Forecast:
    """Plain decoding: one row a step, one step in flight."""
    period = costs.iteration_ms(1)
    reason = f"every token takes a whole round trip of {period:.1f} ms"
    return Forecast(Strategy.SEQUENTIAL, 1, 0, 1, 1.0, period, reason)


def tree(costs: ChainCosts, drafter: DrafterProfile, widths: Sequence[int] = SEARCH.widths) -> Forecast | None:
    """A whole tree a step; the width and depth with most tokens a second. None if nothing can be drafted."""
    candidates: list[tuple[float, int, int, int]] = []  # tokens/ms, -rows, -levels, limit of depth
    depths = range(1, len(drafter.acceptance) + 1) if drafter.level_ms else [len(drafter.acceptance)]
    allowed = set(widths)
    for limit in depths:
        tokens, depth = 1.0, 0
        nodes = list(islice(best_nodes(drafter.acceptance, limit), max(allowed) - 1))
        for rows, (path, chance) in enumerate(nodes, 2):
            tokens, depth = tokens + chance, max(depth, len(path))
            if rows in allowed or rows == len(nodes) + 1:
                period = drafter.round_ms + drafter.level_ms * depth + costs.iteration_ms(rows)
                candidates.append((tokens / period, -rows, -depth, limit))
    if not candidates:
        return None
    most = max(candidates)[0] * (1 - 1e-9)
    _, rows, _, limit = max((c for c in candidates if c[0] >= most), key=lambda c: c[1:])
    return _tree_forecast(costs, drafter, best_shape(drafter.acceptance, -rows, limit))


def _tree_forecast(costs: ChainCosts, drafter: DrafterProfile, shape: TreeShape) -> Forecast:
    tokens = expected_tokens(shape, drafter.acceptance)
    draft = drafter.round_ms + drafter.level_ms * shape.depth
    period = draft + costs.iteration_ms(shape.width)
    reason = (
        f"a tree of {shape.width} rows, {shape.depth} deep, commits {tokens:.2f} tokens a round trip of"
        f" {period:.1f} ms ({draft:.1f} drafting, {costs.compute_ms(shape.width):.1f} computing,"
        f" {costs.links_ms(shape.width):.1f} on the links)"
    )
    return Forecast(Strategy.TREE, shape.width, shape.depth, 1, tokens, period, reason, shape)


def pipedec(
    costs: ChainCosts,
    drafter: DrafterProfile,
    widths: Sequence[int] = SEARCH.widths,
    max_in_flight: int = SEARCH.max_in_flight,
) -> Forecast | None:
    """One tree level a step, several in flight (PipeDec). None if nothing can be drafted."""
    return _best(
        _pipelined_forecast(Strategy.PIPEDEC, costs, drafter, below, width, 1, max_in_flight)
        for width, below in _levels_by_width(drafter, widths)
    )


def pipelined_tree(
    costs: ChainCosts,
    drafter: DrafterProfile,
    widths: Sequence[int] = SEARCH.widths,
    max_in_flight: int = SEARCH.max_in_flight,
) -> Forecast | None:
    """Several tree levels a step, several steps in flight. None if nothing can be drafted."""
    narrow = [width for width in widths if width * min(SEARCH.levels_per_step) <= max(widths)]
    return _best(
        _pipelined_forecast(Strategy.PIPELINED_TREE, costs, drafter, below, width, levels, max_in_flight)
        for width, below in _levels_by_width(drafter, narrow)
        for levels in SEARCH.levels_per_step
        if width * levels <= max(widths)
    )


def _levels_by_width(drafter: DrafterProfile, widths: Sequence[int]) -> Iterator[tuple[int, Sequence[LevelForecast]]]:
    for width in sorted(set(widths)):
        levels = forecast_levels(drafter.acceptance, width, len(drafter.acceptance), drafter.uncertain_fraction)
        yield width, tuple(levels)


def _best(forecasts: Iterable[Forecast | None]) -> Forecast | None:
    """The fastest; the first one on ties."""
    best: Forecast | None = None
    for forecast in forecasts:
        if forecast is not None and (best is None or forecast.tokens_per_s > best.tokens_per_s * (1 + 1e-9)):
            best = forecast
    return best


def _pipelined_forecast(
    strategy: Strategy,
    costs: ChainCosts,
    drafter: DrafterProfile,
    below: Sequence[LevelForecast],
    width: int,
    levels_per_step: int,
    max_in_flight: int,
) -> Forecast | None:
    """Steps of `levels_per_step` levels `below` a known token, of `width` each, as many in flight as fill the chain.

    After a miss the known token is sent alone, or with the first levels if there are several a step, and its result
    comes a round trip later. As long as the sampled token is in the next level, a step's levels are committed in every
    period: the bottleneck hop's time, or the drafter's, or the round trip over the steps in flight, whichever is
    longest. A miss costs a round trip again, as the steps in flight are dropped, and the rest of the step that the
    first hop computes at that time: half of it, in the part of a period that the hop is busy.
    """
    depth = min(len(below), levels_per_step * (max_in_flight - 1))
    if depth < 1:
        return None
    opening = levels_per_step if levels_per_step > 1 else 0  # levels that are sent with the known token
    most = max(2, math.ceil(depth / levels_per_step) + (1 if not opening else 0))  # steps in flight
    run = expected_run(below[:depth], levels_per_step)
    for _ in range(2):  # how many are in flight depends on their rows, and their rows on how far ahead they are
        busy = max(costs.bottleneck_ms(levels_per_step * run.rows), drafter.level_ms * levels_per_step)
        fit = math.ceil(costs.iteration_ms(levels_per_step * run.rows) / busy) if busy > 0 else most
        flight = min(most, max_in_flight, max(2, fit))
        run = expected_run(below[: min(depth, levels_per_step * flight - (1 if not opening else 0))], levels_per_step)
    rows = levels_per_step * run.rows
    step_ms = max(busy, costs.iteration_ms(rows) / flight)
    stale = costs.stages[0].ms(rows) ** 2 / (2 * step_ms)
    first = drafter.round_ms + drafter.level_ms * opening + costs.iteration_ms(rows if opening else 1) + stale
    tokens, period = 1.0 + run.hits, first + step_ms * run.steps
    what = (
        f"{flight} levels of {width}"
        if levels_per_step == 1
        else f"{flight} trees of {levels_per_step} levels of {width}"
    )
    every = "a token is committed" if levels_per_step == 1 else f"up to {levels_per_step} tokens are committed"
    reason = (
        f"with {what} in flight {every} every {step_ms:.1f} ms, {tokens:.2f} of them between misses that cost"
        f" {first:.1f} ms"
    )
    return Forecast(strategy, width * levels_per_step, flight * levels_per_step - 1, flight, tokens, period, reason)


def _why(best: Forecast, ranked: Sequence[Forecast], costs: ChainCosts) -> str:
    others = [
        f"{f.strategy} would give {f.tokens_per_s:.1f} ({f.reason})" for f in ranked if f.strategy is not best.strategy
    ]
    held = "; it is in use and no other is faster by enough to change" if best is not ranked[0] else ""
    chain = f"{len(costs.stages)} hops and {costs.links_ms(1):.1f} ms of links a round trip"
    return "; ".join(
        [
            f"{best.strategy} is expected to give {best.tokens_per_s:.1f} tokens/s over {chain}: {best.reason}{held}",
            *others,
        ]
    )
