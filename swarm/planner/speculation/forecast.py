"""Which strategy, tree width and depth pay off on a chain now: tokens/s predicted for each corner of the policy.

ARCA's choice (Ghidorah §III-C: a measured cost curve against the acceptance of each width), extended by what a chain
adds: the links' time, which makes wide trees cheap, and its hops, which PipeDec (§2.4) keeps busy with one tree level
each. Owns the predictions and the choice. Knows neither how costs and acceptance were measured nor how a strategy runs.

Predictions are expectations over the acceptance table and leave out what all strategies share (sampling, the client's
own work). They rank settings; a measured rate is the judge.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from swarm.errors import UsageError
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.speculation.static_tree import (
    AcceptanceTable,
    TreeShape,
    best_nodes,
    best_shape,
    check_acceptance,
    expected_tokens,
)
from swarm.planner.speculation.tree_forecast import LevelForecast, expected_run, forecast_levels

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # powers of two suit vector units (Ghidorah §III-C 2)
MAX_IN_FLIGHT = 32
LEVELS_A_STEP = (2, 4, 8, 16)  # of a hybrid


class Strategy(enum.StrEnum):
    """The corners of the client's policy that this module compares."""

    SEQUENTIAL = "sequential"
    TREE = "tree"
    PIPEDEC = "pipedec"
    PIPELINED_TREE = "pipelined-tree"  # trees, several of them in flight

    @classmethod
    def _missing_(cls, value: object) -> Strategy | None:
        """What they were called one release ago."""
        return {"pipelined": cls.PIPEDEC, "hybrid": cls.PIPELINED_TREE}.get(str(value))


@dataclass(frozen=True, slots=True)
class DrafterProfile:
    """How well and how fast guesses come. `acceptance[depth][rank]` as in `arca`; no deeper level is drafted.

    `level_ms`: drafting one more level, which waits for the level above; `iteration_ms`: once a round, whatever the depth.
    `hits`: how often an answer that takes so long holds the target's token. `doubtful`: the part of all places that it
    has doubts about and says so, which steps in flight can use and the one shape of a static tree cannot.
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
                f"a drafter is wrong at {wrong:g} of all places and doubts {self.uncertain_fraction:g} of them"
            )


@dataclass(frozen=True, slots=True)
class Forecast:
    """One setting and what it is expected to give.

    `width`: rows a step (for a tree its root's too, for pipelining one level). `depth`: levels drafted ahead.
    `tokens`: settled a round, or a run up to the next miss if pipelined; `iteration_ms`: how long that takes.
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
    """The setting to use, the best of each strategy (fastest first), and why."""

    best: Forecast
    forecasts: tuple[Forecast, ...]
    reason: str


def choose(
    costs: ChainCosts,
    drafter: DrafterProfile,
    *,
    widths: Sequence[int] = WIDTHS,
    max_in_flight: int = MAX_IN_FLIGHT,
    current: Strategy | None = None,
    margin: float = 0.05,
) -> Choice:
    """The fastest setting on this chain with this drafter. On ties the simpler strategy, then the narrower step.

    `current`: the strategy in use, kept unless another is faster by more than the part `margin`, so that noise in the
    measurements does not make a session change its mind every second.
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
    """One node a step, one step in flight."""
    period = costs.iteration_ms(1)
    reason = f"every token waits a whole round of {period:.1f} ms"
    return Forecast(Strategy.SEQUENTIAL, 1, 0, 1, 1.0, period, reason)


def tree(costs: ChainCosts, drafter: DrafterProfile, widths: Sequence[int] = WIDTHS) -> Forecast | None:
    """A whole tree a step; the width and depth with most tokens a second. None if nothing can be guessed."""
    candidates: list[tuple[float, int, int, int]] = []  # tokens/ms, -rows, -levels, limit of depth
    depths = range(1, len(drafter.acceptance) + 1) if drafter.level_ms else [len(drafter.acceptance)]
    wanted = set(widths)
    for limit in depths:
        tokens, depth = 1.0, 0
        nodes = list(islice(best_nodes(drafter.acceptance, limit), max(wanted) - 1))
        for rows, (path, chance) in enumerate(nodes, 2):
            tokens, depth = tokens + chance, max(depth, len(path))
            if rows in wanted or rows == len(nodes) + 1:
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
        f"a tree of {shape.width} rows, {shape.depth} deep, settles {tokens:.2f} tokens a round of"
        f" {period:.1f} ms ({draft:.1f} drafting, {costs.compute_ms(shape.width):.1f} computing,"
        f" {costs.links_ms(shape.width):.1f} on the links)"
    )
    return Forecast(Strategy.TREE, shape.width, shape.depth, 1, tokens, period, reason, shape)


def pipedec(
    costs: ChainCosts, drafter: DrafterProfile, widths: Sequence[int] = WIDTHS, max_in_flight: int = MAX_IN_FLIGHT
) -> Forecast | None:
    """One tree level a step, several in flight (PipeDec). None if nothing can be guessed."""
    return _best(
        _pipelined_forecast(Strategy.PIPEDEC, costs, drafter, below, width, 1, max_in_flight)
        for width, below in _levels_by_width(drafter, widths)
    )


def pipelined_tree(
    costs: ChainCosts, drafter: DrafterProfile, widths: Sequence[int] = WIDTHS, max_in_flight: int = MAX_IN_FLIGHT
) -> Forecast | None:
    """Several tree levels a step, several steps in flight. None if nothing can be guessed."""
    return _best(
        _pipelined_forecast(Strategy.PIPELINED_TREE, costs, drafter, below, width, together, max_in_flight)
        for width, below in _levels_by_width(drafter, [w for w in widths if w * min(LEVELS_A_STEP) <= max(widths)])
        for together in LEVELS_A_STEP
        if width * together <= max(widths)
    )


def _levels_by_width(drafter: DrafterProfile, widths: Sequence[int]) -> Iterator[tuple[int, Sequence[LevelForecast]]]:
    for width in sorted(set(widths)):
        yield (
            width,
            tuple(forecast_levels(drafter.acceptance, width, len(drafter.acceptance), drafter.uncertain_fraction)),
        )


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
    """Steps of `together` of the levels `below` a known token, of `width` each, as many in flight as the chain holds.

    After a miss the known token goes out alone, or with the first levels if there are several a step, and is back a
    round later. As long as the token drawn is in the level that follows, another step's levels settle every slot: the
    slowest hop's time, or the drafter's, or the round's over the steps in flight, whichever is longest. A miss costs a
    round again, as what is in flight is dropped, and what is left of the step that the first hop is at just then: half
    of it, in the part of a slot that the hop works.
    """
    depth = min(len(below), levels_per_step * (max_in_flight - 1))
    if depth < 1:
        return None
    opening = levels_per_step if levels_per_step > 1 else 0  # levels that go out with the known token
    most = max(2, math.ceil(depth / levels_per_step) + (1 if not opening else 0))
    run = expected_run(below[:depth], levels_per_step)
    for _ in range(2):  # how many are in flight depends on their rows, and their rows on how far ahead they are
        busy = max(costs.bottleneck_ms(levels_per_step * run.rows), drafter.level_ms * levels_per_step)
        held = math.ceil(costs.iteration_ms(levels_per_step * run.rows) / busy) if busy > 0 else most
        flight = min(most, max_in_flight, max(2, held))
        run = expected_run(below[: min(depth, levels_per_step * flight - (1 if not opening else 0))], levels_per_step)
    rows = levels_per_step * run.rows
    slot = max(busy, costs.iteration_ms(rows) / flight)
    stale = costs.stages[0].ms(rows) ** 2 / (2 * slot)
    first = drafter.round_ms + drafter.level_ms * opening + costs.iteration_ms(rows if opening else 1) + stale
    tokens, period = 1.0 + run.hits, first + slot * run.steps
    what = (
        f"{flight} levels of {width}"
        if levels_per_step == 1
        else f"{flight} trees of {levels_per_step} levels of {width}"
    )
    every = "a token settles" if levels_per_step == 1 else f"up to {levels_per_step} tokens settle"
    reason = (
        f"with {what} in flight {every} every {slot:.1f} ms, {tokens:.2f} of them between misses that cost"
        f" {first:.1f} ms"
    )
    return Forecast(strategy, width * levels_per_step, flight * levels_per_step - 1, flight, tokens, period, reason)


def _why(best: Forecast, ranked: Sequence[Forecast], costs: ChainCosts) -> str:
    others = [
        f"{f.strategy} would give {f.tokens_per_s:.1f} ({f.reason})" for f in ranked if f.strategy is not best.strategy
    ]
    held = "; it is in use and no other is faster by enough to change" if best is not ranked[0] else ""
    chain = f"{len(costs.stages)} hops and {costs.links_ms(1):.1f} ms of links a round"
    return "; ".join(
        [
            f"{best.strategy} is expected to give {best.tokens_per_s:.1f} tokens/s over {chain}: {best.reason}{held}",
            *others,
        ]
    )
