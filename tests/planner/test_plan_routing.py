"""Phase 2 against brute force: every chain of every small swarm."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from swarm.errors import NoRoute, UsageError
from swarm.planner.routing.route import RouteNode, route
from swarm.types import Chain, Hop

Links = dict[str, dict[str, float]]


def every_chain(nodes: list[RouteNode], num_layers: int) -> Iterator[tuple[Hop, ...]]:
    """Each way to give every layer to a node that holds it; neighbouring layers of one node are one hop."""
    holders = [[n for n in nodes if n.start <= layer < n.end] for layer in range(num_layers)]
    for owners in itertools.product(*holders):
        hops, start = [], 0
        for node, run in itertools.groupby(owners, key=lambda n: n.id):
            end = start + len(list(run))
            hops.append(Hop(node, start, end))
            start = end
        yield tuple(hops)


def stage_ms(nodes: list[RouteNode], hop: Hop) -> float:
    node = next(n for n in nodes if n.id == hop.peer)
    if isinstance(node.layer_ms, int | float):
        return node.layer_ms * (hop.end - hop.start)
    return sum(node.layer_ms[hop.start - node.start : hop.end - node.start])


def latency_ms(nodes: list[RouteNode], rho: Links, hops: tuple[Hop, ...], source: str | None = None) -> float:
    cost = sum(stage_ms(nodes, h) for h in hops) + sum(rho[a.peer][b.peer] for a, b in itertools.pairwise(hops))
    return cost + (rho[source][hops[0].peer] + rho[hops[-1].peer][source] if source else 0.0)


def brute_force(
    nodes: list[RouteNode],
    num_layers: int,
    rho: Links,
    objective: str = "latency",
    source: str | None = None,
    revisits: bool = True,
) -> Chain | None:
    """The best chain by the order of docs/guide/planner.md: cost, hops, ids; then longer first hops."""

    def key(hops: tuple[Hop, ...]) -> tuple[object, ...]:
        latency = latency_ms(nodes, rho, hops, source)
        slowest = max(stage_ms(nodes, h) for h in hops) if objective == "bottleneck" else 0.0
        return slowest, latency, len(hops), tuple(h.peer for h in hops), tuple(-h.end for h in hops)

    chains = (c for c in every_chain(nodes, num_layers) if revisits or len({h.peer for h in c}) == len(c))
    best = min((c for c in chains if latency_ms(nodes, rho, c, source) < float("inf")), key=key, default=None)
    if best is None:
        return None
    return Chain(best, float(key(best)[0] if objective == "bottleneck" else key(best)[1]))  # type: ignore[arg-type]


def random_swarm(rng: random.Random, most_layers: int = 5, most_nodes: int = 5) -> tuple[list[RouteNode], int, Links]:
    """Small whole numbers, so that ties are common; spans anywhere; links that need not obey any triangle."""
    num_layers = rng.randint(1, most_layers)
    top = rng.choice([1, 3, 12])
    nodes = []
    for i in range(rng.randint(1, most_nodes)):
        start = rng.randrange(num_layers)
        end = rng.randint(start + 1, num_layers)
        if rng.random() < 0.4:
            start, end = 0, num_layers
        ms = rng.randint(0, top) if rng.random() < 0.5 else [rng.randint(0, top) for _ in range(end - start)]
        nodes.append(RouteNode(f"n{i}", start, end, ms))
    rng.shuffle(nodes)
    ids = [n.id for n in nodes] + ["me"]
    far = rng.choice([0, 2, 9])
    missing = rng.choice([0.0, 0.0, 0.2])
    rho = {a: {b: float("inf") if rng.random() < missing else rng.randint(0, far) for b in ids} for a in ids}
    for peer in ids:
        rho[peer]["me"] = rho["me"][peer] = rng.randint(0, far)
    return nodes, num_layers, rho


@pytest.mark.parametrize("revisits", [True, False])
@pytest.mark.parametrize("objective", ["latency", "bottleneck"])
def test_the_chain_is_the_best_of_all_chains(objective: str, revisits: bool) -> None:
    rng = random.Random(f"{objective} {revisits}")
    for case in range(400):
        nodes, num_layers, rho = random_swarm(rng)
        source = "me" if case % 2 else None
        expected = brute_force(nodes, num_layers, rho, objective, source, revisits and objective == "latency")
        try:
            found = route(nodes, num_layers, rho, objective, source=source, revisits=revisits)  # type: ignore[arg-type]
        except NoRoute:
            found = None
        assert found == expected, (case, nodes, num_layers, rho, source)


def test_wide_swarms_agree_with_a_plain_layer_program() -> None:
    """Sizes where the shortlist and the whole-stage shortcut are used; costs as from measurement."""
    rng = random.Random(5)
    for nodes_per_layer, aligned in ((24, True), (24, False), (140, True), (140, False)):
        num_layers, nodes = 24, []
        for i in range(3 * nodes_per_layer):
            start = 8 * (i % 3) if aligned else rng.randint(0, 12)
            end = start + 8 if aligned else rng.randint(start + 4, num_layers)
            ms = rng.uniform(0.2, 3.0)
            nodes.append(RouteNode(f"n{i}", start, end, [ms * rng.uniform(0.9, 1.1) for _ in range(end - start)]))
        place = {n.id: (rng.uniform(0, 80), rng.uniform(0, 80)) for n in nodes}
        rho = {
            a: {b: (abs(x - u) + abs(y - v)) * rng.uniform(0.5, 1.5) + 1 for b, (u, v) in place.items()}
            for a, (x, y) in place.items()
        }
        chain = route(nodes, num_layers, rho)
        check_chain(chain, nodes, num_layers)
        assert chain.cost_ms == pytest.approx(plain_layer_program(nodes, num_layers, rho), abs=1e-4)
        assert chain.cost_ms == pytest.approx(latency_ms(nodes, rho, chain.hops))


def plain_layer_program(nodes: list[RouteNode], num_layers: int, rho: Links) -> float:
    """Parallax §3.3 word for word: dp(layer, node), relaxed left to right."""
    cost = {n.id: n.tau(0) for n in nodes if n.start == 0}
    for layer in range(1, num_layers):
        cost = {
            n.id: n.tau(layer) + min(c + (rho[g][n.id] if g != n.id else 0.0) for g, c in cost.items())
            for n in nodes
            if n.start <= layer < n.end
        }
    return min(cost.values())


def check_chain(chain: Chain, nodes: list[RouteNode], num_layers: int) -> None:
    """Every layer once, in order, by a node that holds it."""
    by_id = {n.id: n for n in nodes}
    assert [h.start for h in chain.hops] == [0, *(h.end for h in chain.hops[:-1])]
    assert chain.hops[-1].end == num_layers
    assert all(by_id[h.peer].start <= h.start < h.end <= by_id[h.peer].end for h in chain.hops)


@pytest.mark.parametrize("objective", ["latency", "bottleneck"])
def test_larger_chains_are_valid_and_their_cost_is_right(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(3):
        num_layers = rng.randint(20, 40)
        nodes = []
        for i in range(40):
            start = rng.randrange(num_layers) if i > 3 else 0
            end = rng.randint(start + 1, num_layers) if i > 3 else num_layers
            nodes.append(RouteNode(f"n{i}", start, end, rng.uniform(0.1, 4.0)))
        ids = [n.id for n in nodes]
        rho = {a: {b: rng.uniform(0.0, 5.0) for b in ids} for a in ids}
        chain = route(nodes, num_layers, rho, objective, revisits=False)  # type: ignore[arg-type]
        check_chain(chain, nodes, num_layers)
        assert len(set(chain.peers)) == len(chain)
        claim = latency_ms(nodes, rho, chain.hops)
        if objective == "bottleneck":
            claim = max(stage_ms(nodes, h) for h in chain.hops)
            assert claim <= max(stage_ms(nodes, h) for h in route(nodes, num_layers, rho, revisits=False).hops)
        assert chain.cost_ms == pytest.approx(claim)


def test_equal_nodes_share_a_pipeline_evenly() -> None:
    nodes = [RouteNode(f"n{i}", 0, 12, 1.0) for i in range(5)]
    chain = route(nodes, 12, {}, "bottleneck")
    assert chain.cost_ms == 3.0
    assert len(chain) == 4  # a fifth stage would not make the slowest any faster


def test_a_chain_may_revisit_a_node_in_the_layer_graph_but_not_in_a_session() -> None:
    nodes = [RouteNode("a", 0, 9, 3.0), RouteNode("b", 3, 6, 1.0)]
    rho = {"a": {"b": 1.0}, "b": {"a": 1.0}}
    assert route(nodes, 9, rho).hops == (Hop("a", 0, 3), Hop("b", 3, 6), Hop("a", 6, 9))
    assert route(nodes, 9, rho, revisits=False).hops == (Hop("a", 0, 9),)


def test_links_are_directed_and_a_missing_one_is_read_backwards() -> None:
    nodes = [RouteNode("a", 0, 1, 1.0), RouteNode("b", 1, 2, 1.0), RouteNode("c", 1, 2, 1.0)]
    assert route(nodes, 2, {"a": {"b": 9.0, "c": 3.0}, "b": {"a": 1.0}}).peers == ("a", "c")
    assert route(nodes, 2, {"a": {"b": 2.0}, "c": {"a": 3.0}}).peers == ("a", "b")
    assert route(nodes, 2, lambda a, b: 5.0 if (a, b) == ("a", "b") else 7.0).cost_ms == 7.0


def test_layer_times_may_be_given_for_the_whole_model() -> None:
    whole = RouteNode("a", 2, 4, [9.0, 9.0, 1.0, 2.0])
    first = RouteNode("b", 0, 2, [1.0, 1.0])
    assert route([whole, first], 4, {}).cost_ms == 5.0


def test_what_cannot_be_routed_is_refused_in_one_sentence() -> None:
    nodes = [RouteNode("a", 0, 4, 1.0), RouteNode("b", 6, 8, 1.0)]
    with pytest.raises(NoRoute, match="layers 4:6, 8:10 of 10") as refusal:
        route(nodes, 10, {})
    assert refusal.value.missing == ((4, 6), (8, 10))
    with pytest.raises(NoRoute) as refusal:
        route(nodes, 8, {}, banned={"a"})
    assert refusal.value.missing == ((0, 6),)
    with pytest.raises(NoRoute) as refusal:
        route([], 8, {})
    assert refusal.value.missing == ((0, 8),)
    with pytest.raises(NoRoute, match="no links") as refusal:
        route([RouteNode("a", 0, 4, 1.0), RouteNode("b", 4, 8, 1.0)], 8, {"a": {"b": float("inf")}})
    assert refusal.value.missing == ()
    for wrong in (
        [RouteNode("a", 0, 9, 1.0)],
        [RouteNode("a", 0, 8, -1.0)],
        [RouteNode("a", 0, 8, float("nan"))],
        [RouteNode("a", 0, 8, float("inf"))],
        [RouteNode("a", 0, 8, [1.0, 2.0])],
        [RouteNode("a", 0, 8, 1.0), RouteNode("a", 0, 8, 1.0)],
    ):
        with pytest.raises(UsageError):
            route(wrong, 8, {})
    with pytest.raises(UsageError, match="link a -> b"):
        route([RouteNode("a", 0, 4, 1.0), RouteNode("b", 4, 8, 1.0)], 8, {"a": {"b": -1.0}})


def test_very_slow_chains_are_still_compared() -> None:
    """Hours, not milliseconds: ticks grow coarser instead of overflowing."""
    hour = 3.6e6
    nodes = [RouteNode("a", 0, 64, hour), RouteNode("b", 0, 64, 2 * hour)]
    assert route(nodes, 64, {}).peers == ("a",)
    assert route(nodes, 64, {}).cost_ms == 64 * hour
