"""Phase 2 at scale: ms a route, against a plain-Python layer program in the same run.

    python benchmarks/bench_plan_routing.py [--nodes 4 16 64 256 1024 4096] [--layers 64] [--repeat 30]

Swarms: `pipelines` of 2 to 8 random stages, `stages` of 4 equal ones, `halves`, and `scattered` spans of L/8 to L/2.
Links follow geography (six regions), times of nodes differ eightfold. Columns, best of the repeats in ms:

    graph     arrays from RouteNodes and a matrix of ms
    first     the first route on a graph, edges to the client included, no node twice
    route     the same client again
    clients   a route of one of six clients that route in turn, each with random links of its own; their mean
    profile   `route_snapshot` from NodeProfiles, everything included (links from network coordinates)
    numpy     a route where there is no compiler (left out beyond --plain-up-to nodes)
    plain     Parallax §3.3 as nested loops over dictionaries (left out beyond --plain-up-to nodes)
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from swarm.planner.routing import dag
from swarm.planner.routing.graph import LayerGraph
from swarm.planner.routing.route import RouteNode, route_snapshot
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot

Floats = NDArray[np.float64]
Swarm = tuple[list[RouteNode], Floats, Floats]
KINDS = ("pipelines", "stages", "halves", "scattered")
PUBLISHED = "Parallax reports 0.0136 ms a request for 4 GPUs and 6.63 ms for 256"  # its paper, "Scheduling efficiency"


def make_swarm(kind: str, count: int, num_layers: int, seed: int = 0) -> Swarm:
    """Nodes, ρ `[N, N]` and positions `[N, 2]` in ms."""
    rng = np.random.default_rng(seed)
    regions = rng.uniform(0, 100, (6, 2))
    place = regions[rng.integers(0, 6, count)] + rng.uniform(0, 8, (count, 2))
    rho = (np.linalg.norm(place[:, None] - place, axis=2) + 1) * rng.uniform(0.8, 1.3, (count, count))
    speed = rng.choice([0.3, 0.6, 1.2, 2.4], count) * rng.uniform(0.9, 1.4, count)
    spans = make_spans(kind, count, num_layers, rng)
    nodes = [
        RouteNode(f"node-{i:05}", a, b, [float(speed[i] * x) for x in rng.uniform(0.95, 1.05, b - a)])
        for i, (a, b) in enumerate(spans)
    ]
    return nodes, rho, place


def make_spans(kind: str, count: int, num_layers: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    if kind in ("stages", "halves"):
        parts = 4 if kind == "stages" else 2
        cuts = [num_layers * i // parts for i in range(parts + 1)]
        return [(cuts[i % parts], cuts[i % parts + 1]) for i in range(count)]
    spans: list[tuple[int, int]] = []
    while len(spans) < count:
        if kind == "scattered" and spans:  # after one full chain, so that there is a route
            length = int(rng.integers(num_layers // 8, num_layers // 2 + 1))
            start = int(rng.integers(0, num_layers - length + 1))
            spans.append((start, start + length))
            continue
        stages = int(rng.integers(2, min(8, count) + 1))
        inner = sorted(int(x) for x in rng.choice(np.arange(1, num_layers), stages - 1, replace=False))
        spans += zip([0, *inner], [*inner, num_layers], strict=True)
    return spans[:count]


def plain_layer_program(nodes: list[RouteNode], num_layers: int, rho: list[list[float]], edge: list[float]) -> float:
    """Cost of the best chain: every node of a layer relaxed from every node of the layer before."""
    cost = {i: edge[i] + n.tau(0) for i, n in enumerate(nodes) if n.start == 0}
    for layer in range(1, num_layers):
        following = {}
        for i, node in enumerate(nodes):
            if node.start <= layer < node.end:
                best = math.inf
                for j, before in cost.items():
                    best = min(best, before + (rho[j][i] if i != j else 0.0))
                following[i] = best + node.tau(layer)
        cost = following
    return min(c + edge[i] for i, c in cost.items())


def snapshot_of(nodes: list[RouteNode], rho: Floats, place: Floats, num_layers: int) -> Snapshot:
    """As the directory would give it: coordinates, and measured links to the 24 nearest."""
    ids = [n.id for n in nodes]
    profiles = []
    for i, node in enumerate(nodes):
        nearest = np.argsort(rho[i])[:24]
        profiles.append(
            NodeProfile(
                node.id,
                node.id,
                NodeState.SERVING,
                "bf16",
                "weights",
                node.end - node.start,
                LayerSpan(node.start, node.end),
                layer_ms=tuple(node.layer_ms) if not isinstance(node.layer_ms, int | float) else (),
                network_coordinate=(float(place[i, 0]), float(place[i, 1])),
                link_ms={ids[j]: float(rho[i, j]) for j in nearest},
            )
        )
    return Snapshot("model", num_layers, tuple(profiles))


def best_ms(run: Callable[[], object], repeat: int) -> float:
    best = math.inf
    for _ in range(repeat):
        best = min(best, timed(run))
    return best


def timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1e3


def best_of_clients_ms(graph: LayerGraph, edges: list[Floats], repeat: int) -> float:
    """Mean over clients of each one's best time, ms; they take turns."""
    rounds = [[timed(partial(graph.best, "latency", edge, edge)) for edge in edges] for _ in range(repeat)]
    return float(np.min(rounds, axis=0).mean())


def bench(kind: str, count: int, num_layers: int, repeat: int, plain: bool) -> str:
    nodes, rho, place = make_swarm(kind, count, num_layers)
    edges = np.random.default_rng(1).uniform(5, 60, count)
    repeat = repeat if count <= 1024 else 3
    graph = LayerGraph(nodes, num_layers, rho)
    by_id = {n.id: e for n, e in zip(nodes, edges, strict=True)}
    edge = np.array([by_id[peer] for peer in graph.ids])
    chain = graph.best("latency", edge, edge, revisits=True)
    simple = graph.best("latency", edge, edge)
    built_ms = best_ms(lambda: LayerGraph(nodes, num_layers, rho), min(repeat, 5))
    fresh = [LayerGraph(nodes, num_layers, rho) for _ in range(min(repeat, 20))]
    first_ms = min(timed(partial(g.best, "latency", edge, edge)) for g in fresh)
    route_ms = best_ms(lambda: graph.best("latency", edge, edge), repeat)
    others = [np.random.default_rng(i).uniform(5, 60, count) for i in range(6)]
    clients_ms = best_of_clients_ms(fresh[0], others, repeat)
    seen = snapshot_of(nodes, rho, place, num_layers)
    profile_ms = best_ms(lambda: route_snapshot(seen, client_ms=by_id), min(repeat, 5))
    numpy_ms = plain_ms = "-"
    if plain:
        with mock.patch.object(dag, "compiled", None):
            numpy_ms = f"{best_ms(lambda: graph.best('latency', edge, edge), min(repeat, 5)):.2f}"
        table, there = rho.tolist(), edges.tolist()
        begun = time.perf_counter()
        cost = plain_layer_program(nodes, num_layers, table, there)
        plain_ms = f"{(time.perf_counter() - begun) * 1e3:.1f}"
        if not math.isclose(cost, chain.cost_ms, abs_tol=1e-3):
            raise SystemExit(f"{kind} {count}: the plain program finds {cost} ms, the route {chain.cost_ms} ms")
    replicas = sum(n.end - n.start for n in nodes) / num_layers
    times = f"{built_ms:9.2f} {first_ms:9.3f} {route_ms:9.3f} {clients_ms:9.3f} {profile_ms:9.2f} {numpy_ms:>9}"
    return f"{kind:10} {count:6} {replicas:8.1f} {times} {plain_ms:>10}   {len(simple)} hops, {simple.cost_ms:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--plain-up-to", type=int, default=256)
    args = parser.parse_args()
    columns = ("graph", "first", "route", "clients", "profile", "numpy")
    print("kind        nodes replicas" + "".join(f"{name:>10}" for name in columns) + "      plain   best chain")
    for count in args.nodes:
        for kind in KINDS:
            print(bench(kind, count, args.layers, args.repeat, count <= args.plain_up_to), flush=True)
    print(PUBLISHED)


if __name__ == "__main__":
    main()
