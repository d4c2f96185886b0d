"""The sequence partition against brute force and against Jupiter's own dynamic program."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import UsageError
from swarm.planner.pipeline.prefill_chunking import ChunkCost, PrefillPlan, plan_prefill


def latency(chunks: tuple[int, ...], stages: int, cost: ChunkCost) -> float:
    prefix, times = 0, []
    for chunk in chunks:
        context = prefix + cost.within_chunk * chunk
        times.append(cost.base_ms + cost.per_token_ms * chunk + cost.per_token_context_ms * chunk * context)
        prefix += chunk
    return sum(times) + (stages - 1) * max(times)


def every_cut(length: int, least: int) -> Iterator[tuple[int, ...]]:
    yield (length,)
    for first in range(least, length - least + 1):
        for rest in every_cut(length - first, least):
            yield (first, *rest)


def jupiter(length: int, stages: int, least: int, cost: ChunkCost) -> float:
    """The paper's answer: S(n, k) for every k, then the k of the least latency (of the best cut with that maximum)."""

    @cache
    def slowest(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        if count == 1:
            return (cost.ms(end, 0), (end,)) if end >= least or end == length else (math.inf, (end,))
        options = [
            (max(worst, cost.ms(end - cut, cut)), (*chunks, end - cut))
            for cut in range(least, end - least + 1)
            for worst, chunks in [slowest(cut, count - 1)]
        ]
        return min(options, default=(math.inf, ()))

    cuts = [slowest(length, k) for k in range(1, max(1, length // least) + 1)]
    return min(latency(chunks, stages, cost) for worst, chunks in cuts if worst < math.inf)


def check_valid(plan: PrefillPlan, length: int, stages: int, least: int, cost: ChunkCost) -> None:
    assert sum(plan.chunks) == length
    assert len(plan.chunks) == 1 or min(plan.chunks) >= least
    assert plan.latency_ms == pytest.approx(latency(plan.chunks, stages, cost), rel=1e-12)


def random_cost(rng: random.Random) -> ChunkCost:
    return ChunkCost(
        rng.choice([0, 0.1, 1, 5]),
        rng.choice([0, 0.01, 0.3, 1, rng.random()]),
        rng.choice([0, 0.001, 0.1, 1, rng.random()]),
        rng.choice([0, 0, 0.25, 0.5, 0.5, rng.random() / 2]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_matches_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        length, least, stages = rng.randint(1, 10), rng.randint(1, 4), rng.randint(1, 8)
        cost = random_cost(rng)
        plan = plan_prefill(length, stages, least, cost)
        check_valid(plan, length, stages, least, cost)
        best = min(latency(cut, stages, cost) for cut in every_cut(length, least))
        assert plan.latency_ms == pytest.approx(best, rel=1e-9, abs=1e-12), (length, stages, least, cost)


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_the_paper(seed: int) -> None:
    """Equal where causal attention is charged as it is; where it is not, the paper's cut is not always the best."""
    rng = random.Random(seed)
    for _ in range(30):
        length, least, stages = rng.randint(20, 60), rng.randint(4, 8), rng.randint(2, 8)
        cost = random_cost(rng)
        ours, theirs = plan_prefill(length, stages, least, cost).latency_ms, jupiter(length, stages, least, cost)
        assert ours <= theirs * (1 + 1e-9)
        if cost.within_chunk == 0.5:
            assert ours == pytest.approx(theirs, rel=1e-9)


def test_better_than_the_paper_where_the_sum_depends_on_the_cut() -> None:
    cost = ChunkCost(0, 0.1, 0.01)
    assert plan_prefill(55, 7, 5, cost).latency_ms < 0.99 * jupiter(55, 7, 5, cost)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(1, 40),
    st.integers(8, 200),
    st.just(0.0) | st.floats(1e-30, 1e4, allow_subnormal=False),
    st.just(0.0) | st.floats(1e-30, 1e3, allow_subnormal=False),
    st.just(0.0) | st.floats(1e-30, 1.0, allow_subnormal=False),
    st.floats(0, 0.5, allow_subnormal=False),
)
def test_any_numbers(
    length: int, stages: int, least: int, base: float, token: float, context: float, within: float
) -> None:
    cost = ChunkCost(base, token, context, within)
    plan = plan_prefill(length, stages, least, cost)
    check_valid(plan, length, stages, least, cost)
    assert plan.latency_ms <= latency((length,), stages, cost) * (1 + 1e-12)
    even = max(1, length // max(least, math.ceil(length / stages)))
    cut = (*[length // even] * (even - 1), length - length // even * (even - 1))
    assert plan.latency_ms <= latency(cut, stages, cost) * (1 + 1e-9)


def test_a_long_prompt() -> None:
    """8192 tokens over 8 stages: many chunks, later ones shorter, and far sooner than in one piece."""
    cost = ChunkCost(4.0, 0.2, 1e-4, 0.5)
    plan = plan_prefill(8192, 8, 16, cost)
    check_valid(plan, 8192, 8, 16, cost)
    assert len(plan.chunks) > 8
    assert list(plan.chunks) == sorted(plan.chunks, reverse=True)
    assert plan.latency_ms < latency((8192,), 8, cost) / 4


def test_one_stage_reads_the_prompt_whole() -> None:
    assert plan_prefill(1000, 1, 10, ChunkCost(1, 0.1, 1e-5, 0.5)).chunks == (1000,)


def test_a_short_prompt_stays_whole() -> None:
    assert plan_prefill(15, 8, 8, ChunkCost(0, 1, 0)).chunks == (15,)
    assert plan_prefill(3, 8, 8, ChunkCost(0, 1, 0)).chunks == (3,)
    assert plan_prefill(16, 8, 8, ChunkCost(0, 1, 0)).chunks == (8, 8)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-5, 1, 1), (1 << 20, 2, 1)])
def test_impossible_input_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        plan_prefill(*numbers, ChunkCost(1, 1, 0))


@pytest.mark.parametrize(
    "cost", [(-1, 1, 1), (1, math.nan, 1), (1, 1, math.inf), (1, 5e-324, 0), (1, 1, 1, 0.6), (1, 1, 1, -0.1)]
)
def test_impossible_costs_are_refused(cost: tuple[float, ...]) -> None:
    with pytest.raises(UsageError):
        ChunkCost(*cost)
