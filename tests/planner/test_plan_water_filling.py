"""Water-filling against its definition in exact fractions, on drawn pipelines."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import Infeasible, UsageError
from swarm.planner.placement.water_filling import PoolNode, balance
from swarm.types import Hop

pipelines = st.lists(
    st.tuples(st.integers(0, 40), st.floats(1e-3, 1e3, allow_nan=False) | st.sampled_from([1.0, 2.0, 3.0])),
    min_size=1,
    max_size=8,
)


def nodes_of(*pairs: tuple[int, float]) -> list[PoolNode]:
    return [PoolNode(f"n{i}", capacity, compute) for i, (capacity, compute) in enumerate(pairs)]


def shares_of(num_layers: int, nodes: list[PoolNode]) -> list[int]:
    spans = {hop.peer: hop.end - hop.start for hop in balance(num_layers, nodes).spans}
    return [spans.get(node.id, 0) for node in nodes]


def water_level(num_layers: int, nodes: list[PoolNode]) -> Fraction:
    """The least λ with sum(min(c_i, λ F_i)) = L, by walking the breakpoints c_i / F_i upwards."""
    level, held = Fraction(0), Fraction(0)
    filling = {node.id: node for node in nodes}
    for node in sorted(nodes, key=lambda n: Fraction(n.layer_capacity) / Fraction(n.compute)):
        breakpoint_ = Fraction(node.layer_capacity) / Fraction(node.compute)
        speed = sum((Fraction(n.compute) for n in filling.values()), Fraction(0))
        if held + (breakpoint_ - level) * speed >= num_layers:
            return level + (num_layers - held) / speed
        held += (breakpoint_ - level) * speed
        level = breakpoint_
        del filling[node.id]
    return level


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(pipelines, st.integers(1, 120))
def test_shares_are_the_water_levels_rounded_by_largest_remainder(
    pairs: list[tuple[int, float]], num_layers: int
) -> None:
    nodes = nodes_of(*pairs)
    held = sum(capacity for capacity, _ in pairs)
    if held < num_layers:
        with pytest.raises(Infeasible, match=f"{num_layers - held} layers of memory are missing"):
            balance(num_layers, nodes)
        return
    level = water_level(num_layers, nodes)
    exact = [min(Fraction(node.layer_capacity), level * Fraction(node.compute)) for node in nodes]
    assert sum(exact) == num_layers
    shares = shares_of(num_layers, nodes)
    assert sum(shares) == num_layers
    assert all(share <= node.layer_capacity for share, node in zip(shares, nodes, strict=True))
    remainders = [x - math.floor(x) for x in exact]
    up = [share - math.floor(x) for share, x in zip(shares, exact, strict=True)]
    assert set(up) <= {0, 1}
    rounded_up = [r for r, u in zip(remainders, up, strict=True) if u]
    rounded_down = [r for r, u in zip(remainders, up, strict=True) if not u]
    if rounded_up and rounded_down:
        assert min(rounded_up) >= max(rounded_down)
    assert balance(num_layers, nodes).scale == pytest.approx(float(level), rel=1e-12)


@given(pipelines)
def test_spans_cover_every_layer_once_in_pipeline_order(pairs: list[tuple[int, float]]) -> None:
    nodes = nodes_of(*pairs)
    num_layers = sum(capacity for capacity, _ in pairs) * 2 // 3
    if not num_layers:
        return
    spans = balance(num_layers, nodes).spans
    assert spans[0].start == 0
    assert spans[-1].end == num_layers
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    order = [node.id for node in nodes]
    assert [order.index(hop.peer) for hop in spans] == sorted(order.index(hop.peer) for hop in spans)


def test_a_full_node_leaves_the_rest_to_the_others() -> None:
    assert shares_of(30, nodes_of((4, 10.0), (40, 1.0), (40, 1.0))) == [4, 13, 13]


def test_equal_remainders_go_to_the_lower_id() -> None:
    nodes = [PoolNode("b", 10, 1.0), PoolNode("a", 10, 1.0), PoolNode("c", 10, 1.0)]
    assert shares_of(10, nodes) == [3, 4, 3]
    assert shares_of(11, nodes) == [4, 4, 3]


def test_a_node_whose_share_rounds_to_nothing_is_left_out() -> None:
    assert balance(8, nodes_of((8, 100.0), (8, 0.01), (8, 100.0))).spans == (Hop("n0", 0, 4), Hop("n2", 4, 8))


def test_exactly_enough_memory_fills_every_node() -> None:
    answer = balance(9, nodes_of((4, 2.0), (5, 1.0)))
    assert answer.spans == (Hop("n0", 0, 4), Hop("n1", 4, 9))
    assert answer.scale == 5.0


def test_speeds_many_orders_of_magnitude_apart() -> None:
    assert shares_of(10, nodes_of((10, 5e-324), (6, 1e308))) == [4, 6]
    assert shares_of(10, nodes_of((10, 5e-324), (10, 5e-324))) == [5, 5]


@pytest.mark.parametrize("compute", [0.0, -1.0, math.nan, math.inf])
def test_invalid_compute_is_refused(compute: float) -> None:
    with pytest.raises(UsageError, match="compute"):
        PoolNode("a", 1, compute)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(UsageError, match="layer_capacity"):
        PoolNode("a", -1, 1.0)
    with pytest.raises(UsageError, match="same id"):
        balance(2, [PoolNode("a", 1, 1.0), PoolNode("a", 1, 1.0)])
    with pytest.raises(UsageError, match="num_layers"):
        balance(0, [PoolNode("a", 1, 1.0)])
    with pytest.raises(Infeasible):
        balance(1, [])
