"""Routes over snapshots: which nodes may be chained, what is assumed of links, and the explanation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.errors import NoRoute
from swarm.planner.routing.route import (
    DEFAULT_LINK_MS,
    RouteTable,
    explain_snapshot,
    route_snapshot,
    snapshot_links,
    snapshot_rho,
)
from swarm.types import CostCurve, Hop, LayerSpan, NodeProfile, NodeState, Snapshot


def serving(peer: str, start: int, end: int, ms: float = 1.0) -> NodeProfile:
    span = LayerSpan(start, end)
    return NodeProfile(peer, f"the {peer}", NodeState.SERVING, "bf16", "w", 12, span, layer_ms=(ms,) * len(span))


def of(*nodes: NodeProfile) -> Snapshot:
    return Snapshot("m", 12, tuple(sorted(nodes, key=lambda n: n.peer)))


A, B, C = serving("a", 0, 6), serving("b", 6, 12), serving("c", 6, 12)


def test_links_are_measured_else_measured_backwards_else_estimated_else_assumed() -> None:
    a = replace(A, link_ms={"b": 3.0, "gone": 1.0, "c": math.nan}, network_coordinate=(0.0, 0.0))
    b = replace(B, network_coordinate=(3.0, 4.0))
    c = replace(C, network_coordinate=(6.0, 8.0))
    d = replace(C, peer="d", network_coordinate=(1.0,))
    rho = snapshot_links(of(a, b, c, d))
    assert [rho("a", "b"), rho("b", "a"), rho("a", "c"), rho("b", "c"), rho("a", "d")] == [
        3.0,
        3.0,
        10.0,
        5.0,
        DEFAULT_LINK_MS,
    ]
    asymmetric = snapshot_links(of(a, replace(b, link_ms={"a": 8.0})))
    assert (asymmetric("a", "b"), asymmetric("b", "a")) == (3.0, 8.0)
    strange = replace(b, network_coordinate=(math.inf, 0.0), link_ms={"a": -1.0, "c": math.inf})
    assert snapshot_rho([strange, c])[0, 1] == DEFAULT_LINK_MS


def test_the_client_counts_both_ways() -> None:
    near, far = replace(B, layer_ms=(2.0,) * 6), C
    swarm = of(A, near, far)
    assert route_snapshot(swarm).peers == ("a", "c")
    chain = route_snapshot(swarm, client_ms={"a": 1.0, "b": 2.0, "c": 30.0})
    assert chain.peers == ("a", "b")
    assert chain.cost_ms == 1.0 + 6.0 + DEFAULT_LINK_MS + 12.0 + 2.0
    assert route_snapshot(swarm, client_ms={}).cost_ms == 6.0 + 6.0 + 3 * DEFAULT_LINK_MS


def test_a_chain_never_mixes_weights_or_dtypes() -> None:
    other_weights = replace(B, peer="x", weight_hash="v")
    other_dtype = replace(C, peer="y", dtype="fp32")
    with pytest.raises(NoRoute) as refusal:
        route_snapshot(of(A, other_weights, other_dtype))
    assert refusal.value.missing in (((0, 6),), ((6, 12),))  # each group lacks a half
    assert "another dtype" in str(refusal.value)
    whole = replace(serving("z", 0, 12, 9.0), dtype="fp32")
    swarm = of(A, B, whole, other_dtype)
    assert route_snapshot(swarm).peers == ("a", "b")
    assert route_snapshot(swarm, dtype="fp32").hops == (Hop("z", 0, 12),)
    assert route_snapshot(of(A, B, other_weights), weight_hash="w").peers == ("a", "b")


def test_only_nodes_that_serve_and_have_room_are_used() -> None:
    for state in (NodeState.JOINING, NodeState.LOADING, NodeState.DRAINING):
        with pytest.raises(NoRoute):
            route_snapshot(of(A, replace(B, state=state)))
    full = replace(B, kv_capacity_tokens=1000, kv_free_tokens=10)
    assert route_snapshot(of(A, full)).peers == ("a", "b")
    assert route_snapshot(of(A, full, C), min_free_tokens=11).peers == ("a", "c")
    with pytest.raises(NoRoute, match="full or have just failed") as refusal:
        route_snapshot(of(A, full), min_free_tokens=11)
    assert refusal.value.missing == ((6, 12),)


def test_a_node_with_invalid_times_is_left_out() -> None:
    for wrong in (
        replace(B, layer_ms=(math.nan,) * 6),
        replace(B, layer_ms=(-1.0,) * 6),
        replace(B, layer_ms=(), cost=CostCurve((1,), (math.inf,))),
        replace(B, span=LayerSpan(6, 13), layer_ms=(0.0,) * 7),
    ):
        assert route_snapshot(of(A, wrong, C)).peers == ("a", "c")


def test_layer_times_not_measured_are_read_off_the_cost_curve() -> None:
    unmeasured = replace(B, layer_ms=(), cost=CostCurve((1, 8), (4.0, 9.0)))
    assert route_snapshot(of(A, unmeasured)).cost_ms == 6.0 + DEFAULT_LINK_MS + 24.0


def test_one_table_gives_many_routes() -> None:
    table = RouteTable(of(A, B, replace(C, layer_ms=(2.0,) * 6)))
    assert table.route().peers == ("a", "b")
    assert table.route(banned={"b"}).peers == ("a", "c")
    assert table.route(objective="bottleneck").cost_ms == 6.0
    assert table.route().peers == ("a", "b")
    with pytest.raises(NoRoute) as refusal:
        table.route(banned={"a"})
    assert refusal.value.missing == ((0, 6),)


def test_an_empty_swarm_says_how_to_start_one() -> None:
    with pytest.raises(NoRoute, match="swarm-node join") as refusal:
        route_snapshot(of())
    assert refusal.value.missing == ((0, 12),)
    with pytest.raises(NoRoute, match="nobody serves this model"):
        route_snapshot(Snapshot("m", 0, ()))


def test_a_chain_explains_itself() -> None:
    swarm = of(A, B, replace(C, layer_ms=(2.0,) * 6))
    client_ms = {"a": 1.0, "b": 2.0, "c": 3.0}
    said = explain_snapshot(route_snapshot(swarm, client_ms=client_ms), swarm, client_ms).splitlines()
    assert said == [
        "hop 1: the a (a) runs layers 0:6 in 6.0 ms after 1.0 ms on the link",
        "hop 2: the b (b) runs layers 6:12 in 6.0 ms after 50.0 ms on the link",
        "and 2.0 ms back to the client",
        "in all 65.0 ms a token",
        "links nobody has measured: the a (a) -> the b (b) (assumed)",
        "without the a (a) there would be no chain",
        "without the b (b) it would be 72.0 ms, over 2 nodes",
    ]
