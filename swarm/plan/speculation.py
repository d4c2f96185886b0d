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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from swarm.errors import UsageError
from swarm.plan.arca import AcceptanceTable, TreeShape, best_nodes, best_shape, check_acceptance, expected_tokens
from swarm.plan.levels import Level, levels, run_of
from swarm.plan.prefill import ChunkCost
from swarm.types import Chain, CostCurve, PeerId, Snapshot

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # powers of two suit vector units (Ghidorah §III-C 2)
MAX_IN_FLIGHT = 32
LEVELS_A_STEP = (2, 4, 8, 16)  # of a hybrid
NOTHING_MS = 1e-9
CHUNK = 256  # tokens; an ordinary chunk of a prompt
NARROWEST_CHUNK = 8  # from there on a curve is close to a line


class Strategy(enum.StrEnum):
    """The corners of the client's policy that this module compares (design section 8)."""

    SEQUENTIAL = "sequential"
    TREE = "tree"
    PIPEDEC = "pipedec"
    PIPELINED_TREE = "pipelined-tree"  # trees, several of them in flight

    @classmethod
    def _missing_(cls, value: object) -> Strategy | None:
        """What they were called one release ago."""
        return {"pipelined": cls.PIPEDEC, "hybrid": cls.PIPELINED_TREE}.get(str(value))


@dataclass(frozen=True, slots=True)
class Stage:
    """One hop. `layer_ms` is τ, queue included, of one of its `layers`; `cost` how a layer's time grows with width."""

    layers: int
    layer_ms: float
    cost: CostCurve = field(default_factory=CostCurve)

    def ms(self, width: float) -> float:
        """A step of `width` rows, ms: waiting for others does not grow with our width, computing does."""
        return self.layers * max(0.0, self.layer_ms + self.cost.at(width) - self.cost.at(1))

    def chunk_cost(self) -> ChunkCost:
        """The line through the curve's wide points that is least off, relatively: one of them alone may be noise."""
        widths = [width for width in self.cost.widths if width >= NARROWEST_CHUNK]
        if len(widths) < 2:
            widths = list(self.cost.widths[-2:]) if len(self.cost.widths) > 1 else [1, 2]
        points = [(width, ms, ms**-2) for width in widths if (ms := self.ms(width)) > 0]
        weight = math.fsum(w for _, _, w in points)
        if not weight:
            return ChunkCost(0.0, 0.0)
        mean = math.fsum(w * x for x, _, w in points) / weight
        mean_ms = math.fsum(w * y for _, y, w in points) / weight
        spread = math.fsum(w * (x - mean) ** 2 for x, _, w in points)
        rise = math.fsum(w * (x - mean) * (y - mean_ms) for x, y, w in points)
        per_token = _something(rise / spread) if spread else mean_ms / mean
        base = _something(mean_ms - per_token * mean)
        return ChunkCost(base, per_token) if base else ChunkCost(0.0, _something(mean_ms / mean))


def _something(ms: float) -> float:
    """0 for what only rounding has left, or a node that claims to take no time."""
    return ms if ms > NOTHING_MS else 0.0


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """A chain as a step meets it. `link_ms`: one way, client -> first hop, between hops, tail -> client, `[hops + 1]`.

    `row_ms`: what one more row adds to a link between hops (its hidden state over the bandwidth).
    """

    stages: tuple[Stage, ...]
    link_ms: tuple[float, ...]
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages or len(self.link_ms) != len(self.stages) + 1:
            hops, links = len(self.stages), len(self.link_ms)
            raise UsageError(f"a chain needs at least one hop, and one link more than hops; not {hops} and {links}")
        numbers = [*self.link_ms, self.row_ms, *(s.layer_ms for s in self.stages)]
        if not all(0 <= x < math.inf for x in numbers) or any(s.layers < 1 for s in self.stages):
            raise UsageError("a chain's times must be finite and not negative, and each hop needs a layer")
        if self.round_ms(1) <= 0:
            raise UsageError("a chain whose round takes no time cannot be planned for; give its layer or link times")

    @classmethod
    def of(
        cls, chain: Chain, snapshot: Snapshot, link_ms: Callable[[PeerId, PeerId], float], client: PeerId = ""
    ) -> ChainCosts:
        """From the live map: each hop's mean τ over its layers and cost curve, ρ as `link_ms(from, to)` says."""
        stages = []
        for hop in chain.hops:
            node = snapshot.node(hop.peer)
            if node is None:
                raise UsageError(f"the snapshot does not know {hop.peer}, which the chain runs over")
            times = node.layer_ms[hop.start - node.span.start : hop.end - node.span.start] if node.span else ()
            stages.append(
                Stage(hop.end - hop.start, math.fsum(times) / len(times) if times else node.cost.at(1), node.cost)
            )
        ends = (client, *chain.peers, client)
        return cls(tuple(stages), tuple(link_ms(a, b) for a, b in pairwise(ends)))

    def compute_ms(self, width: float) -> float:
        return math.fsum(stage.ms(width) for stage in self.stages)

    def links_ms(self, width: float) -> float:
        return math.fsum(self.link_ms) + self.row_ms * (width - 1) * (len(self.stages) - 1)

    def round_ms(self, width: float) -> float:
        """From sending a step of `width` rows to its result."""
        return self.compute_ms(width) + self.links_ms(width)

    def chunk_cost(self) -> ChunkCost:
        """What a chunk of a prompt costs at the slowest hop, as one line."""
        return max((stage.chunk_cost() for stage in self.stages), key=lambda cost: cost.ms(CHUNK, 0))

    def pipelined_ms(self, chunks: Sequence[int], step_ms: float = 0.0) -> float:
        """From the first chunk's start until the last hop has done the last one (Jupiter, eq. 4), links left out."""
        each = {length: self.slowest_ms(length) + step_ms for length in set(chunks)}
        return math.fsum(each[length] for length in chunks) + (len(self.stages) - 1) * max(each.values())

    def slowest_ms(self, width: float) -> float:
        """How often a step of `width` rows can follow another: the slowest hop, or a link's sending time."""
        between = self.row_ms * width if len(self.stages) > 1 else 0.0
        return max(between, *(stage.ms(width) for stage in self.stages))


@dataclass(frozen=True, slots=True)
class Drafter:
    """How well and how fast guesses come. `acceptance[depth][rank]` as in `arca`; no deeper level is drafted.

    `level_ms`: drafting one more level, which waits for the level above; `round_ms`: once a round, whatever the depth.
    `hits`: how often an answer that takes so long holds the target's token. `doubtful`: the part of all places that it
    has doubts about and says so, which steps in flight can use and the one shape of a static tree cannot.
    """

    acceptance: AcceptanceTable
    level_ms: float = 0.0
    round_ms: float = 0.0
    hits: float = 0.5
    doubtful: float = 1.0

    def __post_init__(self) -> None:
        check_acceptance(self.acceptance)
        if not all(0 <= x < math.inf for x in (self.level_ms, self.round_ms)):
            raise UsageError("a drafter's times must be finite and not negative")
        wrong = max((1 - row[0] for row in self.acceptance if row), default=0.0)
        if not 0 < self.doubtful <= 1 or wrong > self.doubtful + 1e-9:
            raise UsageError(f"a drafter is wrong at {wrong:g} of all places and doubts {self.doubtful:g} of them")


@dataclass(frozen=True, slots=True)
class Forecast:
    """One setting and what it is expected to give.

    `width`: rows a step (for a tree its root's too, for pipelining one level). `depth`: levels drafted ahead.
    `tokens`: settled a round, or a run up to the next miss if pipelined; `period_ms`: how long that takes.
    """

    strategy: Strategy
    width: int
    depth: int
    in_flight: int
    tokens: float
    period_ms: float
    reason: str
    shape: TreeShape = field(default_factory=TreeShape)

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.period_ms


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting to use, the best of each strategy (fastest first), and why."""

    best: Forecast
    forecasts: tuple[Forecast, ...]
    reason: str


def choose(
    costs: ChainCosts,
    drafter: Drafter,
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
        pipelined(costs, drafter, widths, max_in_flight),
        hybrid(costs, drafter, widths, max_in_flight),
    ]
    ranked = sorted((f for f in forecasts if f is not None), key=lambda f: -f.tokens_per_s)
    best = ranked[0]
    kept = next((f for f in ranked if f.strategy is current), None)
    if kept is not None and best.tokens_per_s <= kept.tokens_per_s * (1 + margin):
        best = kept
    return Choice(best, tuple(ranked), _why(best, ranked, costs))


def sequential(costs: ChainCosts) -> Forecast:
    """One node a step, one step in flight."""
    period = costs.round_ms(1)
    reason = f"every token waits a whole round of {period:.1f} ms"
    return Forecast(Strategy.SEQUENTIAL, 1, 0, 1, 1.0, period, reason)


def tree(costs: ChainCosts, drafter: Drafter, widths: Sequence[int] = WIDTHS) -> Forecast | None:
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
                period = drafter.round_ms + drafter.level_ms * depth + costs.round_ms(rows)
                candidates.append((tokens / period, -rows, -depth, limit))
    if not candidates:
        return None
    most = max(candidates)[0] * (1 - 1e-9)
    _, rows, _, limit = max((c for c in candidates if c[0] >= most), key=lambda c: c[1:])
    return _tree_forecast(costs, drafter, best_shape(drafter.acceptance, -rows, limit))


def _tree_forecast(costs: ChainCosts, drafter: Drafter, shape: TreeShape) -> Forecast:
    tokens = expected_tokens(shape, drafter.acceptance)
    draft = drafter.round_ms + drafter.level_ms * shape.depth
    period = draft + costs.round_ms(shape.width)
    reason = (
        f"a tree of {shape.width} rows, {shape.depth} deep, settles {tokens:.2f} tokens a round of"
        f" {period:.1f} ms ({draft:.1f} drafting, {costs.compute_ms(shape.width):.1f} computing,"
        f" {costs.links_ms(shape.width):.1f} on the links)"
    )
    return Forecast(Strategy.TREE, shape.width, shape.depth, 1, tokens, period, reason, shape)


def pipelined(
    costs: ChainCosts, drafter: Drafter, widths: Sequence[int] = WIDTHS, max_in_flight: int = MAX_IN_FLIGHT
) -> Forecast | None:
    """One tree level a step, several in flight (PipeDec). None if nothing can be guessed."""
    return _best(
        _flow(Strategy.PIPEDEC, costs, drafter, below, width, 1, max_in_flight)
        for width, below in _levels_by_width(drafter, widths)
    )


def hybrid(
    costs: ChainCosts, drafter: Drafter, widths: Sequence[int] = WIDTHS, max_in_flight: int = MAX_IN_FLIGHT
) -> Forecast | None:
    """Several tree levels a step, several steps in flight. None if nothing can be guessed."""
    return _best(
        _flow(Strategy.PIPELINED_TREE, costs, drafter, below, width, together, max_in_flight)
        for width, below in _levels_by_width(drafter, [w for w in widths if w * min(LEVELS_A_STEP) <= max(widths)])
        for together in LEVELS_A_STEP
        if width * together <= max(widths)
    )


def _levels_by_width(drafter: Drafter, widths: Sequence[int]) -> Iterator[tuple[int, Sequence[Level]]]:
    for width in sorted(set(widths)):
        yield width, tuple(levels(drafter.acceptance, width, len(drafter.acceptance), drafter.doubtful))


def _best(forecasts: Iterable[Forecast | None]) -> Forecast | None:
    """The fastest; the first one on ties."""
    best: Forecast | None = None
    for forecast in forecasts:
        if forecast is not None and (best is None or forecast.tokens_per_s > best.tokens_per_s * (1 + 1e-9)):
            best = forecast
    return best


def _flow(
    strategy: Strategy,
    costs: ChainCosts,
    drafter: Drafter,
    below: Sequence[Level],
    width: int,
    together: int,
    max_in_flight: int,
) -> Forecast | None:
    """Steps of `together` of the levels `below` a known token, of `width` each, as many in flight as the chain holds.

    After a miss the known token goes out alone, or with the first levels if there are several a step, and is back a
    round later. As long as the token drawn is in the level that follows, another step's levels settle every slot: the
    slowest hop's time, or the drafter's, or the round's over the steps in flight, whichever is longest. A miss costs a
    round again, as what is in flight is dropped, and what is left of the step that the first hop is at just then: half
    of it, in the part of a slot that the hop works.
    """
    depth = min(len(below), together * (max_in_flight - 1))
    if depth < 1:
        return None
    opening = together if together > 1 else 0  # levels that go out with the known token
    most = max(2, math.ceil(depth / together) + (1 if not opening else 0))
    run = run_of(below[:depth], together)
    for _ in range(2):  # how many are in flight depends on their rows, and their rows on how far ahead they are
        busy = max(costs.slowest_ms(together * run.rows), drafter.level_ms * together)
        held = math.ceil(costs.round_ms(together * run.rows) / busy) if busy > 0 else most
        flight = min(most, max_in_flight, max(2, held))
        run = run_of(below[: min(depth, together * flight - (1 if not opening else 0))], together)
    rows = together * run.rows
    slot = max(busy, costs.round_ms(rows) / flight)
    stale = costs.stages[0].ms(rows) ** 2 / (2 * slot)
    first = drafter.round_ms + drafter.level_ms * opening + costs.round_ms(rows if opening else 1) + stale
    tokens, period = 1.0 + run.hits, first + slot * run.steps
    what = f"{flight} levels of {width}" if together == 1 else f"{flight} trees of {together} levels of {width}"
    every = "a token settles" if together == 1 else f"up to {together} tokens settle"
    reason = (
        f"with {what} in flight {every} every {slot:.1f} ms, {tokens:.2f} of them between misses that cost"
        f" {first:.1f} ms"
    )
    return Forecast(strategy, width * together, flight * together - 1, flight, tokens, period, reason)


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
