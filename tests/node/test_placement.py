"""Which layers a node takes, why, and when it takes its word back."""

from __future__ import annotations

import pytest

from swarm.errors import UsageError
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_node.membership.placement import choose, manual_span, still_valid


def node(
    peer: str,
    span: tuple[int, int] | None = None,
    state: NodeState | None = None,
    capacity: int = 4,
    dtype: str = "bf16",
) -> NodeProfile:
    return NodeProfile(
        peer=peer,
        name="",
        state=state or (NodeState.LOADING if span else NodeState.JOINING),
        dtype=dtype,
        weight_hash="h",
        layer_capacity=capacity,
        span=LayerSpan(*span) if span else None,
        kv_capacity_tokens=100,
    )


def swarm(*nodes: NodeProfile) -> Snapshot:
    return Snapshot("toy", 8, tuple(sorted(nodes, key=lambda n: n.peer)))


def test_layers_that_were_asked_for_must_exist() -> None:
    assert manual_span("2:8", 8) == LayerSpan(2, 8)
    with pytest.raises(UsageError, match="the model's 8 layers"):
        manual_span("2:9", 8)


def test_the_first_node_takes_what_it_can() -> None:
    placed = choose(swarm(), node("a"))
    assert placed.span == LayerSpan(0, 4)
    assert placed.reason == "layers 0:4, because nobody serves 0:8"
    assert choose(swarm(), node("a", capacity=8)).span == LayerSpan(0, 8)


def test_a_gap_is_filled_before_anything_else() -> None:
    placed = choose(swarm(node("a", (0, 4), NodeState.SERVING)), node("b"))
    assert placed.span == LayerSpan(4, 8)
    assert "because nobody serves 4:8" in placed.reason


def test_those_who_join_at_once_agree_whatever_order_they_look_in() -> None:
    nodes = [node(p) for p in "abc"]
    spans = {n.peer: choose(swarm(*nodes), n).span for n in nodes}
    assert set(spans.values()) >= {LayerSpan(0, 4), LayerSpan(4, 8)}


def test_nodes_of_another_format_do_not_count() -> None:
    placed = choose(swarm(node("a", (0, 8), NodeState.SERVING, dtype="fp32")), node("b"))
    assert placed.span == LayerSpan(0, 4)


def test_a_covered_swarm_says_where_it_is_short() -> None:
    placed = choose(swarm(node("a", (0, 8), NodeState.SERVING)), node("b"))
    assert "least room" in placed.reason
    whole = choose(swarm(node("a", (0, 8), NodeState.SERVING)), node("b", capacity=8))
    assert "the whole model" in whole.reason


def test_of_two_that_took_the_same_layers_at_once_one_chooses_again() -> None:
    a, b = node("a", (0, 4)), node("b", (0, 4))
    assert still_valid(swarm(a, b), a)
    assert not still_valid(swarm(a, b), b)


def test_nobody_leaves_a_swarm_without_gaps_or_a_gap_of_its_own_making() -> None:
    a, b, c = node("a", (0, 4)), node("b", (0, 4)), node("c", (4, 8))
    assert still_valid(swarm(a, b, c), b)
    assert still_valid(swarm(a), a)
    assert not still_valid(swarm(node("z", (0, 4), NodeState.SERVING), a), a)
