"""Levels of a draft tree against every pattern of uncertain positions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.planner.speculation.tree_forecast import LevelForecast, expected_run, forecast_levels

ROWS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4).map(lambda row: sorted(row, reverse=True))


def test_hits_are_conditional() -> None:
    """Two of nine paths survive a level of width 2; the second level's chance is of what the first level held."""
    found = list(forecast_levels([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], 2, 5))
    assert [level.hit for level in found] == pytest.approx([0.9, (0.3 + 0.24) / 0.9])
    assert [level.rows for level in found] == [2, 2]


def test_the_first_level_that_cannot_be_hit_ends_them() -> None:
    assert [level.hit for level in forecast_levels([[0.5], [0.0], [0.5]], 2, 5)] == [0.5]


@given(ROWS, st.floats(0.1, 1.0), st.integers(1, 12), st.integers(1, 5), st.floats(0.5, 1.0))
def test_levels_with_some_uncertain_positions(
    weights: list[float], uncertain: float, width: int, depth: int, total: float
) -> None:
    torn = [total * weight / math.fsum(weights) for weight in weights]
    average = [(1 - uncertain) + uncertain * torn[0], *(uncertain * p for p in torn[1:])]
    covered, rows = [0.0] * depth, [0.0] * depth
    for pattern in itertools.product((True, False), repeat=depth):
        chance = math.prod(uncertain if is_uncertain else 1 - uncertain for is_uncertain in pattern)
        paths = [1.0]
        for level, is_uncertain in enumerate(pattern):
            paths = sorted((path * p for path in paths for p in (torn if is_uncertain else [1.0])), reverse=True)[
                :width
            ]
            covered[level] += chance * math.fsum(paths)
            rows[level] += chance * len(paths)
    found = list(forecast_levels([average] * depth, width, depth, uncertain))
    assert list(itertools.accumulate((level.hit for level in found), float.__mul__)) == pytest.approx(covered)
    assert [level.rows for level in found] == pytest.approx(rows)


LEVELS = st.lists(st.builds(LevelForecast, st.floats(0.01, 0.95), st.floats(1.0, 64.0)), min_size=1, max_size=6)


@given(LEVELS, st.integers(1, 4))
def test_a_run_is_the_sum_of_the_chances_to_get_so_far(ahead: list[LevelForecast], together: int) -> None:
    alive, hits, steps, rows = 1.0, 0.0, 0.0, 0.0
    for number in range(1, 2000):
        level = ahead[min(number, len(ahead)) - 1]
        alive *= level.hit
        hits, rows = hits + alive, rows + alive * level.rows
        steps += alive if number % together == 0 else 0.0
    found = expected_run(ahead, together)
    assert (found.hits, found.steps, found.rows) == pytest.approx((hits, steps, rows / hits))
