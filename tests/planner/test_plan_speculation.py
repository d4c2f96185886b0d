"""Predicted tokens/s against formulas, exhaustive choice and a simulated pipeline; what is chosen when, and why."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TypeAlias

import pytest

from swarm.errors import UsageError
from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.speculation.forecast import (
    DrafterProfile,
    Strategy,
    choose,
    pipedec,
    sequential,
    tree,
)
from swarm.planner.speculation.policy import SEARCH
from swarm.planner.speculation.static_tree import best_shape, expected_tokens
from swarm.types import UNMEASURED, Chain, CostCurve, Hop, LayerSpan, NodeProfile, NodeState, Snapshot

FLAT = CostCurve((1, 64), (1.0, 1.0))
RISING = CostCurve((1, 4, 8, 16, 32, 64), (1.0, 1.1, 1.25, 1.6, 2.4, 4.2))
GOOD = [[0.8, 0.1, 0.03]] * 24
POOR = [[0.02]] * 24

Level: TypeAlias = list[tuple[tuple[int, ...], float]]
"""Paths by rank, and how likely each is."""


def chain(hops: int, link_ms: float = 0.0, cost: CostCurve = FLAT, layers: int = 10, row_ms: float = 0.0) -> ChainCosts:
    return ChainCosts(tuple(Stage(layers, 1.0, cost) for _ in range(hops)), (link_ms,) * (hops + 1), row_ms)


def test_sequential_is_one_token_a_round_trip() -> None:
    costs = ChainCosts((Stage(10, 2.0, UNMEASURED), Stage(5, 4.0, UNMEASURED)), (5.0, 20.0, 7.0))
    assert sequential(costs).tokens_per_s == pytest.approx(1000 / (20 + 20 + 32))


@pytest.mark.parametrize("level_ms", [0.0, 3.0])
@pytest.mark.parametrize("link_ms", [0.0, 40.0])
def test_the_best_tree_of_all_widths_and_depths(level_ms: float, link_ms: float) -> None:
    costs, drafter = chain(3, link_ms, RISING, row_ms=0.1), DrafterProfile(GOOD[:6], level_ms, round_ms=1.0)
    best = max(
        expected_tokens(shape, drafter.acceptance) / (1.0 + level_ms * shape.depth + costs.iteration_ms(shape.width))
        for width in SEARCH.widths[1:]
        for depth in range(1, 7)
        for shape in [best_shape(drafter.acceptance, width, depth)]
    )
    found = tree(costs, drafter)
    assert found is not None
    assert found.tokens_per_s == pytest.approx(1000 * best)
    assert found.shape.width == found.width


def test_a_longer_round_trip_pays_for_a_wider_tree() -> None:
    """Ghidorah's width is the machine's; over a network the round costs the same whatever is verified in it."""
    widths = []
    for link_ms in (0.0, 30.0, 300.0):
        found = tree(chain(1, link_ms, RISING), DrafterProfile(GOOD[:6]))
        assert found is not None
        widths.append(found.width)
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


@pytest.mark.parametrize(
    ("hops", "committed", "threshold"), [(4, 2.0, 2 / 3), (4, 2.5, 0.8), (8, 2.0, 4 / 7), (14, 3.3, 0.751)]
)
def test_when_pipelining_beats_a_tree(hops: int, committed: float, threshold: float) -> None:
    """With free links and drafts a miss costs about N-1 slots; a static tree of `committed` tokens takes N slots.

    The thresholds are those of hops in lockstep; a hop that is amid a dropped step when the miss is known adds to them.
    """
    costs = chain(hops)
    for hit, wins in ((threshold, False), (threshold + 0.05, True)):
        found = pipedec(costs, DrafterProfile([[hit]] * 31), [1])
        assert found is not None
        assert (found.tokens_per_s > 1000 * committed / costs.iteration_ms(1)) is wins


def simulate(costs: ChainCosts, drafter: DrafterProfile, width: int, flight: int, tokens: int = 4000) -> float:
    """Tokens/s of PipeDec's tree on a pipeline, drawn token by token: levels grown, hit, pruned, or all dropped.

    The drafter's first row holds everywhere, uncertain positions are random.
    """
    rng = random.Random(7)
    row, uncertain = drafter.acceptance[0], drafter.uncertain_fraction
    torn = [1 - (1 - row[0]) / uncertain, *(p / uncertain for p in row[1:])]

    def deeper(level: Level, place: Sequence[float]) -> Level:
        paths = [((*path, rank), p * q) for path, p in level for rank, q in enumerate(place) if q > 0]
        return sorted(paths, key=lambda item: -item[1])[:width]

    clock, committed = 0.0, 0
    while committed < tokens:
        clock += costs.iteration_ms(1)
        committed += 1
        places = [torn if rng.random() < uncertain else [1.0] for _ in range(flight - 1)]
        levels: list[Level] = []
        for place in places:
            levels.append(deeper(levels[-1] if levels else [((), 1.0)], place))
        sent = [len(level) for level in levels]  # rows
        while True:
            place, *places = places
            drawn = rng.choices([*range(len(place)), -1], [*place, max(0.0, 1 - sum(place))])[0]
            rows = sent.pop(0)
            slot = max(costs.bottleneck_ms(rows), costs.iteration_ms(rows) / flight)
            if not any(path[0] == drawn for path, _ in levels[0]):
                clock += max(0.0, costs.stages[0].ms(rows) - rng.random() * slot)
                break
            levels = [[(path[1:], p) for path, p in level if path[0] == drawn] for level in levels[1:]]
            places.append(torn if rng.random() < uncertain else [1.0])
            levels.append(deeper(levels[-1] if levels else [((), 1.0)], places[-1]))
            sent.append(len(levels[-1]))
            clock += slot
            committed += 1
    return 1000 * committed / clock


@pytest.mark.slow
@pytest.mark.parametrize("hops", [3, 6])
@pytest.mark.parametrize("row", [[0.7], [0.7, 0.15, 0.05], [0.6, 0.2, 0.1, 0.05]])
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("uncertain", [0.4, 1.0])
def test_pipelined_agrees_with_a_simulated_pipeline(hops: int, row: list[float], width: int, uncertain: float) -> None:
    costs, drafter = chain(hops, 10.0, RISING), DrafterProfile([row] * 31, uncertain_fraction=uncertain)
    found = pipedec(costs, drafter, [width])
    assert found is not None
    assert found.tokens_per_s == pytest.approx(simulate(costs, drafter, width, found.in_flight), rel=0.08)


def test_each_strategy_has_its_place() -> None:
    assert choose(chain(1, 0.0, RISING), DrafterProfile(GOOD)).best.strategy is Strategy.TREE
    assert choose(chain(12, 20.0, RISING), DrafterProfile(GOOD)).best.strategy is Strategy.PIPEDEC
    assert choose(chain(3, 10.0, RISING), DrafterProfile(POOR, level_ms=5.0)).best.strategy is Strategy.SEQUENTIAL
    assert choose(chain(3), DrafterProfile([])).best.strategy is Strategy.SEQUENTIAL


def test_a_slow_drafter_is_hidden_by_the_pipeline_only() -> None:
    costs = chain(8, 20.0, RISING)
    quick, slow = choose(costs, DrafterProfile(GOOD)), choose(costs, DrafterProfile(GOOD, level_ms=30.0))
    by_name = {f.strategy: f for f in slow.forecasts}
    was = {f.strategy: f for f in quick.forecasts}
    lost = {s: by_name[s].tokens_per_s / was[s].tokens_per_s for s in (Strategy.TREE, Strategy.PIPEDEC)}
    assert lost[Strategy.TREE] < 1
    assert lost[Strategy.PIPEDEC] < 1
    assert slow.best.strategy is Strategy.PIPEDEC


def test_the_choice_is_the_fastest_and_gives_its_reason() -> None:
    rng = random.Random(0)
    for _ in range(200):
        hops = rng.randint(1, 8)
        stages = tuple(Stage(rng.randint(1, 20), rng.uniform(0.2, 3), RISING) for _ in range(hops))
        costs = ChainCosts(stages, tuple(rng.uniform(0, 60) for _ in range(hops + 1)))
        top = rng.uniform(0, 0.95)
        drafter = DrafterProfile([[top, (1 - top) / 2]] * rng.randint(0, 12), rng.choice([0, 2, 20]))
        choice = choose(costs, drafter)
        assert choice.best.tokens_per_s == max(f.tokens_per_s for f in choice.forecasts)
        for forecast in choice.forecasts:
            assert forecast.strategy in choice.reason
            assert f"{forecast.tokens_per_s:.1f}" in choice.reason
            assert forecast.in_flight >= 1
            assert forecast.tokens_per_iteration >= 1


def test_the_strategy_in_use_is_kept_unless_another_is_clearly_faster() -> None:
    costs, drafter = chain(6, 15.0, RISING), DrafterProfile(GOOD)
    ranked = choose(costs, drafter).forecasts
    second, gain = ranked[1], ranked[0].tokens_per_s / ranked[1].tokens_per_s - 1
    assert choose(costs, drafter, current=second.strategy, margin=gain * 1.01).best == second
    assert choose(costs, drafter, current=second.strategy, margin=gain * 0.99).best == ranked[0]
    assert "in use" in choose(costs, drafter, current=second.strategy, margin=gain * 1.01).reason


def test_more_steps_in_flight_never_predict_less() -> None:
    costs, drafter = chain(6, 40.0, RISING), DrafterProfile(GOOD)
    rates = [choose(costs, drafter, max_in_flight=n).best.tokens_per_s for n in range(1, 32)]
    assert all(b >= a * (1 - 1e-3) for a, b in itertools.pairwise(rates))
    assert pipedec(costs, drafter, SEARCH.widths, 1) is None


def test_costs_come_from_the_snapshot() -> None:
    curve = CostCurve((1, 8), (2.0, 3.0))
    nodes = (
        NodeProfile("a", "a", NodeState.SERVING, "bf16", "h", 9, LayerSpan(0, 4), layer_ms=(1, 2, 3, 4), cost=curve),
        NodeProfile("b", "b", NodeState.SERVING, "bf16", "h", 9, LayerSpan(2, 6), layer_ms=(9, 9, 5, 7), cost=curve),
    )
    snapshot = Snapshot("m", 6, nodes)
    links = {("", "a"): 5.0, ("a", "b"): 11.0, ("b", ""): 6.0}
    costs = ChainCosts.of(Chain((Hop("a", 1, 4), Hop("b", 4, 6))), snapshot, lambda a, b: links[a, b])
    assert costs.stages == (Stage(3, 3.0, curve), Stage(2, 6.0, curve))
    assert costs.link_ms == (5.0, 11.0, 6.0)
    assert costs.compute_ms(8) == pytest.approx(3 * 4 + 2 * 7)
    with pytest.raises(UsageError, match="has no node z"):
        ChainCosts.of(Chain((Hop("z", 0, 6),)), snapshot, lambda a, b: 1.0)


@pytest.mark.parametrize(
    ("stages", "links"),
    [
        ((), (1.0,)),
        ((Stage(1, 1.0, UNMEASURED),), (1.0,)),
        ((Stage(1, -1.0, UNMEASURED),), (1.0, 1.0)),
        ((Stage(0, 1.0, UNMEASURED),), (1.0, 1.0)),
        ((Stage(1, 1.0, UNMEASURED),), (1.0, float("inf"))),
        ((Stage(1, 0.0, UNMEASURED),), (0.0, 0.0)),
    ],
)
def test_impossible_chains_are_refused(stages: tuple[Stage, ...], links: tuple[float, ...]) -> None:
    with pytest.raises(UsageError):
        ChainCosts(stages, links)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UsageError):
        DrafterProfile([[0.5]], level_ms=-1)
    with pytest.raises(UsageError):
        DrafterProfile([[2.0]])
    with pytest.raises(UsageError):
        choose(chain(1), DrafterProfile([]), widths=())
