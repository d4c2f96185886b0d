"""A short run of `virtual_chaos`; `make chaos` has the long ones."""

from __future__ import annotations

import pytest
from virtual_chaos import one

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(2))
def test_churn_changes_no_token_and_leaves_nothing_behind(seed: int) -> None:
    result = one(seed, nodes=9, seconds=15.0, clients=2)
    assert result.answers["right"] > 5


def test_the_same_seed_gives_the_same_trace() -> None:
    first, second = (one(7, nodes=6, seconds=8.0, clients=2).trace for _ in range(2))
    assert first == second
    assert len(first) > 10
