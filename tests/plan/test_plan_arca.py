"""ARCA's trees against every tree of the same width; measured acceptance; the local search."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from swarm.errors import UsageError
from swarm.plan.arca import (
    RankPath,
    TreeShape,
    best_shape,
    expected_tokens,
    local_search,
    measured_tokens,
)


def every_shape(ranks: list[int], nodes: int) -> Iterator[frozenset[RankPath]]:
    """All parent-closed sets of at most `nodes` rank paths."""
    seen = {frozenset[RankPath]()}
    frontier = list(seen)
    while frontier:
        paths = frontier.pop()
        yield paths
        if len(paths) == nodes:
            continue
        for parent in [(), *paths]:
            for rank in range(ranks[len(parent)]) if len(parent) < len(ranks) else ():
                larger = paths | {(*parent, rank)}
                if larger not in seen:
                    seen.add(larger)
                    frontier.append(larger)


def random_table(rng: random.Random, ranks: list[int]) -> list[list[float]]:
    table = []
    for count in ranks:
        weights = [rng.choice([0.0, 0.1, rng.random()]) for _ in range(count)]
        scale = rng.random() / max(1.0, sum(weights))
        table.append([w * scale for w in weights])
    return table


@pytest.mark.parametrize("seed", range(5))
def test_no_tree_of_the_width_settles_more(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        ranks = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        nodes = rng.randint(0, 5)
        shapes = [TreeShape.of_paths(list(paths)) for paths in every_shape(ranks, nodes)]
        for _ in range(5):
            table = random_table(rng, ranks)
            shape = best_shape(table, nodes + 1)
            assert shape.width <= nodes + 1
            best = max(expected_tokens(other, table) for other in shapes)
            assert expected_tokens(shape, table) == pytest.approx(best, rel=1e-12)


def test_a_wider_tree_never_settles_less_and_depth_can_be_capped() -> None:
    table = [[0.6, 0.15, 0.05], [0.5, 0.1], [0.4, 0.2], [0.3]]
    lengths = [expected_tokens(best_shape(table, width), table) for width in range(1, 30)]
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert best_shape(table, 64, max_depth=2).depth == 2
    assert best_shape(table, 3).paths() == ((0,), (0, 0))


def test_guesses_that_never_succeed_are_left_out() -> None:
    assert best_shape([[0.5, 0.0], [0.0]], 10).paths() == ((0,),)
    assert best_shape([], 10) == TreeShape()


def dependent_trace(rng: random.Random) -> list[int | None]:
    """Right first guesses are followed by right first guesses; a second guess by a second."""
    first = rng.choices([0, 1, None], [0.5, 0.4, 0.1])[0]
    if first is None:
        return [None]
    return [first, first if rng.random() < 0.9 else 1 - first]


def test_local_search_finds_what_the_table_cannot_see() -> None:
    rng = random.Random(3)
    traces = [dependent_trace(rng) for _ in range(2000)]
    reached = [t for t in traces if t[0] is not None]
    table = [
        [sum(t[0] == r for t in traces) / len(traces) for r in (0, 1)],
        [sum(t[1] == r for t in reached) / len(reached) for r in (0, 1)],
    ]
    start = best_shape(table, 5)
    found = local_search(start, lambda shape: measured_tokens(shape, traces), [2, 2])
    assert found.width == start.width
    assert found.paths() == ((0,), (1,), (0, 0), (1, 1))
    assert measured_tokens(found, traces) > measured_tokens(start, traces) + 0.2


@pytest.mark.parametrize("seed", range(3))
def test_local_search_cannot_improve_the_greedy_tree_on_its_own_table(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        ranks = [rng.randint(1, 4) for _ in range(3)]
        table = random_table(rng, ranks)
        shape = best_shape(table, rng.randint(1, 9))
        assert local_search(shape, lambda other, t=table: expected_tokens(other, t), ranks) == shape  # type: ignore[misc]


def test_measured_tokens_counts_the_longest_match() -> None:
    shape = TreeShape.of_paths([(0,), (0, 1)])
    assert measured_tokens(shape, [[0, 1, 0], [0, 0], [None], [1, 1]]) == pytest.approx(1 + 3 / 4)
    with pytest.raises(UsageError):
        measured_tokens(shape, [])


@pytest.mark.parametrize("table", [[[1.2]], [[-0.1]], [[0.6, 0.6]], [[float("nan")]]])
def test_impossible_tables_are_refused(table: list[list[float]]) -> None:
    with pytest.raises(UsageError):
        best_shape(table, 2)


def test_impossible_widths_and_shapes_are_refused() -> None:
    with pytest.raises(UsageError):
        best_shape([[0.5]], 0)
    with pytest.raises(UsageError):
        TreeShape.of_paths([(0, 0)])
