"""ARCA's trees against every tree of the same width."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from swarm.errors import UsageError
from swarm.planner.speculation.static_tree import (
    RankPath,
    TreeShape,
    best_shape,
    expected_tokens,
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
def test_no_tree_of_the_width_has_more_expected_tokens(seed: int) -> None:
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


def test_a_wider_tree_never_has_fewer_expected_tokens_and_depth_can_be_capped() -> None:
    table = [[0.6, 0.15, 0.05], [0.5, 0.1], [0.4, 0.2], [0.3]]
    lengths = [expected_tokens(best_shape(table, width), table) for width in range(1, 30)]
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert best_shape(table, 64, max_depth=2).depth == 2
    assert best_shape(table, 3).paths() == ((0,), (0, 0))


def test_candidates_that_are_never_accepted_are_left_out() -> None:
    assert best_shape([[0.5, 0.0], [0.0]], 10).paths() == ((0,),)
    assert best_shape([], 10) == TreeShape()


@pytest.mark.parametrize("table", [[[1.2]], [[-0.1]], [[0.6, 0.6]], [[float("nan")]]])
def test_impossible_tables_are_refused(table: list[list[float]]) -> None:
    with pytest.raises(UsageError):
        best_shape(table, 2)


def test_impossible_widths_and_shapes_are_refused() -> None:
    with pytest.raises(UsageError):
        best_shape([[0.5]], 0)
    with pytest.raises(UsageError):
        TreeShape.of_paths([(0, 0)])
