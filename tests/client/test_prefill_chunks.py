"""Prompts are cut for the chain in use, within bounds."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.pipeline.prefill_chunking import plan_prefill
from swarm.types import UNMEASURED, CostCurve
from swarm_client.routing.prefill_chunks import POLICY, prompt_chunks

CURVE = CostCurve((1, 8, 32, 64), (0.5, 0.7, 1.3, 2.1))


def chain(hops: int, curve: CostCurve = CURVE) -> ChainCosts:
    return ChainCosts(tuple(Stage(4, curve.ms_at(1), curve) for _ in range(hops)), (5.0,) * (hops + 1))


@pytest.mark.parametrize("hops", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 31, 64, 300, 1000, 4096])
def test_chunks_are_the_planners_within_bounds(length: int, hops: int) -> None:
    chunks = prompt_chunks(length, chain(hops))
    assert sum(chunks) == length
    assert max(chunks) <= POLICY.max_chunk
    cost = chain(hops).chunk_cost()
    assert cost.ms(64, 0) == pytest.approx(4 * CURVE.ms_at(64))
    with_step = msgspec.structs.replace(cost, base_ms=cost.base_ms + POLICY.step_ms)
    planned = plan_prefill(length, hops, POLICY.min_chunk, with_step).chunks
    assert len(chunks) >= len(planned)
    if max(planned) <= POLICY.max_chunk:
        assert chain(hops).prefill_ms(chunks, POLICY.step_ms) <= chain(hops).prefill_ms(planned, POLICY.step_ms)


def test_chunks_are_as_long_as_pays_best_on_a_bent_curve() -> None:
    """Up to 64 tokens take hardly longer than one, more take their time: the line through all points knows no bend."""
    bent = CostCurve((1, 8, 64, 256), (4.0, 4.1, 4.2, 16.8))
    costs = chain(4, bent)
    assert set(prompt_chunks(1024, costs)) == {64}
    assert costs.prefill_ms((64,) * 16) == pytest.approx(19 * 4 * 4.2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 5.0), min_size=2, max_size=8), st.integers(1, 3000), st.integers(1, 8))
def test_no_equal_cut_at_a_point_of_the_curve_beats_the_chunks(rises: list[float], length: int, hops: int) -> None:
    ms = tuple(itertools.accumulate(rises))
    costs = chain(hops, CostCurve(tuple(1 << i for i in range(len(ms))), ms))
    least = costs.prefill_ms(prompt_chunks(length, costs), POLICY.step_ms)
    for width in (8, 16, 32, 64, 128):
        if width < 1 << len(ms):
            count = -(-length // width)
            equal = [length * (i + 1) // count - length * i // count for i in range(count)]
            assert least <= costs.prefill_ms(equal, POLICY.step_ms) * (1 + 1e-9)


def test_more_hops_mean_more_and_shorter_chunks() -> None:
    counts = [len(prompt_chunks(1024, chain(hops))) for hops in (1, 2, 4, 8)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_the_slowest_hop_rules() -> None:
    slow = CostCurve((1, 64), (5.0, 40.0))
    mixed = ChainCosts((*chain(2).stages, Stage(4, slow.ms_at(1), slow)), (1.0,) * 4)
    assert mixed.chunk_cost() == ChainCosts((Stage(4, slow.ms_at(1), slow),), (1.0, 1.0)).chunk_cost()


def test_a_curve_that_says_nothing_still_gives_chunks() -> None:
    assert sum(prompt_chunks(700, chain(3, UNMEASURED))) == 700
    assert prompt_chunks(0, chain(2)) == ()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-9, 0.001, 0.37, 1.1, 1.1, 8.6e6]), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.001, 0.3, 1.7, 8.6e6]),
    st.integers(1, 200),
)
def test_whatever_a_node_says_of_itself_its_chunks_have_a_cost(ms: list[float], layer_ms: float, layers: int) -> None:
    curve = CostCurve(tuple(1 << i for i in range(len(ms))), tuple(ms))
    costs = ChainCosts((Stage(layers, layer_ms, curve),), (1.0, 1.0))
    assert costs.chunk_cost().ms(256, 0) >= 0.0
    assert sum(prompt_chunks(700, costs)) == 700


def test_a_flat_curve_has_a_line_too() -> None:
    for ms in (0.1, 0.3, 0.7, 1.234567, 3.3):
        for top in range(4, 10):
            curve = CostCurve(tuple(1 << i for i in range(top)), (ms,) * top)
            assert Stage(10, ms, curve).chunk_cost().per_token_ms == 0.0
