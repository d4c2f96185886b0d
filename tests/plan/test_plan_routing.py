"""Phase 2 against brute force: every chain of every small swarm."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from swarm.errors import NoRoute, UsageError
from swarm.plan.routing import RouteNode, route
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
    return sum(node.tau(layer) for layer in range(hop.start, hop.end))


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
    """The best chain by the order of design section 7: cost, hops, ids; then longer first hops."""

    def key(hops: tuple[Hop, ...]) -> tuple[object, ...]:
        latency = latency_ms(nodes, rho, hops, source)
        slowest = max(stage_ms(nodes, h) for h in hops) if objective == "bottleneck" else 0.0
        return slowest, latency, len(hops), tuple(h.peer for h in hops), tuple(-h.end for h in hops)

    chains = (c for c in every_chain(nodes, num_layers) if revisits or len({h.peer for h in c}) == len(c))
    best = min((c for c in chains if latency_ms(nodes, rho, c, source) < float("inf")), key=key, default=None)
    if best is None:
        return None
    return Chain(best, float(key(best)[0] if objective == "bottleneck" else key(best)[1]))  # type: ignore[arg-type]


def random_swarm(rng: random.Random, most_layers: int = 6, most_nodes: int = 5) -> tuple[list[RouteNode], int, Links]:
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
    for case in range(500):
        nodes, num_layers, rho = random_swarm(rng)
        source = "me" if case % 2 else None
        expected = brute_force(nodes, num_layers, rho, objective, source, revisits and objective == "latency")
        try:
            found = route(nodes, num_layers, rho, objective, source=source, revisits=revisits)  # type: ignore[arg-type]
        except NoRoute:
            found = None
        assert found == expected, (case, nodes, num_layers, rho, source)
