"""Parallax phase 2 (§3.3): the best chain through the layer DAG of a swarm, and why it is the best.

Owns which nodes may be chained together, the time assumed for a link that was not measured, and the explanation. The
dynamic program is in `dag`, chains without repeats in `simple_paths`, pipelines in `bottleneck`, routes around a lost
node in `repair`. Knows neither where profiles come from (`records`, `net.discovery`) nor how a session runs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from swarm.errors import NoRoute, UsageError
from swarm.planner.routing.graph import Floats, LayerGraph, link_matrix, no_route_sentence
from swarm.planner.routing.nodes import Links, Objective, RouteNode, links
from swarm.planner.routing.rules import ChainRules
from swarm.types import Chain, NodeProfile, PeerId, Snapshot, coverage, missing_ranges

__all__ = [
    "CLIENT",
    "DEFAULT_LINK_MS",
    "Links",
    "Objective",
    "RouteNode",
    "RouteTable",
    "explain",
    "explain_snapshot",
    "links",
    "profile_nodes",
    "route",
    "route_snapshot",
    "snapshot_links",
]

DEFAULT_LINK_MS = 50.0  # of a link that was neither measured nor estimated; half a transcontinental round trip
CLIENT = ""
"""The client's name in `snapshot_links`; no peer id is empty."""


def route(
    nodes: Iterable[RouteNode],
    num_layers: int,
    link_ms: Links,
    objective: Objective = "latency",
    banned: Collection[str] = frozenset(),
    source: str | None = None,
    *,
    revisits: bool = True,
) -> Chain:
    """The best chain over `[0, num_layers)`.

    Cost of a chain, ms: "latency" is the sum of τ over every layer of every hop plus ρ between consecutive hops;
    "bottleneck" is the largest sum of τ in one hop (links carry many steps at once, so they do not bound a
    pipeline), and among chains with that bottleneck the one of the least latency. Ties: fewer hops, then the lower ids
    hop by hop, then the longer first hops. Costs are compared to the nanosecond.

    `link_ms` is ρ, one way, not necessarily symmetric, infinite for no link; a pair that a mapping leaves out is read
    in the other direction, and costs nothing if that is missing too. `source` is the client's name in `link_ms`: then
    the edges client -> first hop and tail -> client count as well. `revisits`: whether a chain may return to a node it
    has left, as the layer DAG allows; a chain for a session may not (`RouteTable`), a pipeline never does.

    O(L R²) for R nodes a layer. Raises NoRoute with the layers that no node serves, UsageError for an invalid span, τ
    or ρ.
    """
    usable = [n for n in nodes if n.id not in banned]
    ids = [n.id for n in usable]
    if len(set(ids)) < len(ids):
        twice = next(peer for peer in ids if ids.count(peer) > 1)
        raise UsageError(f"node {twice} is listed twice; give each node an id of its own")
    _check_coverage(usable, num_layers)
    graph = LayerGraph(usable, num_layers, link_matrix(ids, link_ms))
    if source is None:
        return graph.best(objective, revisits=revisits)
    rho = links(link_ms)
    entry = np.array([rho(source, peer) for peer in graph.ids])
    leave = np.array([rho(peer, source) for peer in graph.ids])
    return graph.best(objective, entry, leave, revisits=revisits)


def route_snapshot(
    snapshot: Snapshot,
    *,
    client_ms: Mapping[PeerId, float] | None = None,
    banned: Collection[PeerId] = frozenset(),
    objective: Objective = "latency",
    dtype: str | None = None,
    weight_hash: str | None = None,
    min_free_tokens: int = 0,
) -> Chain:
    """`RouteTable(snapshot, ...).route(...)`: for one route from a snapshot. Raises NoRoute."""
    table = RouteTable(snapshot, dtype=dtype, weight_hash=weight_hash, min_free_tokens=min_free_tokens)
    return table.route(client_ms=client_ms, banned=banned, objective=objective)


class RouteTable:
    """The routes of one snapshot; what all of them share is computed once.

    A chain never mixes weight hashes or dtypes, visits no peer twice and keeps `rules`. Left out: nodes that are not
    serving, that publish less than `min_free_tokens` of free KV, or whose times are invalid.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        dtype: str | None = None,
        weight_hash: str | None = None,
        min_free_tokens: int = 0,
        rules: ChainRules = ChainRules(),
    ) -> None:
        self.snapshot, self.rules = snapshot, rules
        self._made_with: dict[str, Any] = {
            "dtype": dtype,
            "weight_hash": weight_hash,
            "min_free_tokens": min_free_tokens,
        }
        fitting = (
            (n.span.start, n.span.end, n.peer, n)
            for n in snapshot.serving()
            if dtype in (None, n.dtype)
            and weight_hash in (None, n.weight_hash)
            and n.span is not None
            and n.span.end <= snapshot.num_layers
            and times_are_sane(n)
        )
        self._fitting = [node for *_, node in sorted(fitting, key=itemgetter(0, 1, 2))]
        groups: dict[tuple[str, str], list[NodeProfile]] = {}
        for node in self._fitting:
            if not node.kv_capacity_tokens or node.kv_free_tokens >= min_free_tokens:
                groups.setdefault((node.weight_hash, node.dtype), []).append(node)
        self.groups = dict(sorted(groups.items()))
        self.graphs: dict[tuple[str, str], LayerGraph] = {
            key: LayerGraph(profile_nodes(group), snapshot.num_layers, rules.links(group, snapshot_rho(group)))
            for key, group in self.groups.items()
        }

    def route(
        self,
        *,
        client_ms: Mapping[PeerId, float] | None = None,
        banned: Collection[PeerId] = frozenset(),
        objective: Objective = "latency",
    ) -> Chain:
        """The best chain of the best group of nodes with the same weights and dtype.

        `client_ms`: ρ between this client and the nodes it has measured, one way; given, the edges to the first hop and
        from the tail count, `DEFAULT_LINK_MS` for nodes not in it. Raises NoRoute.
        """
        chains: list[Chain] = []
        errors: list[NoRoute] = []
        for graph in self.graphs.values():
            try:
                chains.append(graph.best(objective, *self.edges(graph, client_ms), banned))
            except NoRoute as error:
                errors.append(error)
        if chains:
            return min(chains, key=lambda chain: (round(chain.cost_ms, 6), len(chain), chain.peers))
        raise self.no_route(errors, lambda table: table.route(client_ms=client_ms, banned=banned, objective=objective))

    def edges(self, graph: LayerGraph, client_ms: Mapping[PeerId, float] | None) -> tuple[Floats, Floats]:
        """ρ from the client to each row of `graph` and back, ms, by the rules; 0 if they do not count."""
        edge_ms = client_edges(graph, client_ms)
        return self.rules.edges(graph.ids, np.zeros(len(graph.ids)) if edge_ms is None else edge_ms)

    def no_route(self, errors: Sequence[NoRoute], again: Callable[[RouteTable], object]) -> NoRoute:
        """The rule without which `again` finds a chain; else the error of the group that came closest to one, with what
        would help."""
        for rules, sentence in self.rules.relaxed():
            with contextlib.suppress(NoRoute):
                again(RouteTable(self.snapshot, **self._made_with, rules=rules))
                return NoRoute(sentence)
        num_layers = self.snapshot.num_layers
        held = missing_ranges(coverage((n.span for n in self._fitting if n.span), num_layers))
        if held or not self._fitting:
            return NoRoute(no_route_sentence(held, num_layers), held)
        closest = min(errors, key=lambda e: sum(b - a for a, b in e.missing), default=None)
        if closest is not None and not closest.missing:
            return closest
        missing = closest.missing if closest else ((0, num_layers),)
        ranges = ", ".join(f"{a}:{b}" for a, b in missing)
        mixed = len({(n.weight_hash, n.dtype) for n in self._fitting}) > 1
        others = ", or run other weights or another dtype than the rest" if mixed else ""
        return NoRoute(
            f"the nodes that serve layers {ranges} of {num_layers} are full or have just failed{others};"
            " try again in a moment, or start another with: swarm-node join",
            missing,
        )


def _check_coverage(nodes: Iterable[RouteNode], num_layers: int) -> None:
    missing = missing_ranges(coverage((n.span(num_layers) for n in nodes), num_layers))
    if missing:
        raise NoRoute(no_route_sentence(missing, num_layers), missing)


def times_are_sane(node: NodeProfile) -> bool:
    times = (*node.layer_ms, node.cost.ms_at(1))
    return sum(times) < math.inf and min(times) >= 0.0  # with NaN or both infinities among them, the sum is NaN


def profile_nodes(profiles: Iterable[NodeProfile]) -> list[RouteNode]:
    """The profiles that have a span, as input of phase 2; τ not yet measured is read off the cost curve."""
    return [
        RouteNode(p.peer, p.span.start, p.span.end, p.layer_ms if len(p.layer_ms) == len(p.span) else p.cost.ms_at(1))
        for p in profiles
        if p.span is not None
    ]


# Links ---------------------------------------------------------------------------------------------------------------


def snapshot_rho(profiles: Sequence[NodeProfile]) -> Floats:
    """ρ between all pairs in ms, `[N, N]` by (from, to).

    Measured by the sender, else measured by the receiver, else estimated from network coordinates, else
    `DEFAULT_LINK_MS`. Invalid times count as not measured.
    """
    place = {p.peer: i for i, p in enumerate(profiles)}
    rho = _distances(profiles)
    counts = [len(p.link_ms) for p in profiles]
    measured = itertools.chain.from_iterable(p.link_ms.values() for p in profiles)
    ms = np.fromiter(measured, np.float64, sum(counts))
    by = np.repeat(np.arange(len(profiles)), counts)
    to = np.array([place.get(peer, -1) for p in profiles for peer in p.link_ms], np.int64)
    usable = (to >= 0) & (ms >= 0.0) & (ms < math.inf)
    by, to, ms = by[usable], to[usable], ms[usable]
    rho[to, by] = ms
    rho[by, to] = ms
    return rho


def _distances(profiles: Sequence[NodeProfile]) -> Floats:
    """Euclidean distances of network coordinates of the same dimension, else `DEFAULT_LINK_MS`, `[N, N]`."""
    result = np.full((len(profiles), len(profiles)), DEFAULT_LINK_MS)
    for dimensions in sorted({len(p.network_coordinate) for p in profiles} - {0}):
        rows = [i for i, p in enumerate(profiles) if len(p.network_coordinate) == dimensions]
        rows = [i for i in rows if all(map(math.isfinite, profiles[i].network_coordinate))]
        points = np.array([profiles[i].network_coordinate for i in rows]).reshape(-1, dimensions)
        squares, difference = np.zeros((len(rows), len(rows))), np.empty((len(rows), len(rows)))
        for axis in points.T:
            np.subtract.outer(axis, axis, out=difference)
            difference *= difference
            squares += difference
        np.sqrt(squares, out=squares)
        if len(rows) == len(profiles):
            return squares
        result[np.ix_(rows, rows)] = squares
    return result


def snapshot_links(
    snapshot: Snapshot, client_ms: Mapping[PeerId, float] | None = None
) -> Callable[[PeerId, PeerId], float]:
    """ρ in ms as in `RouteTable`, with `CLIENT` as one more peer."""
    from_client = client_ms or {}
    place = {n.peer: i for i, n in enumerate(snapshot.nodes)}
    table = snapshot_rho(snapshot.nodes)

    def rho(a: PeerId, b: PeerId) -> float:
        if CLIENT in (a, b):
            return from_client.get(b or a, DEFAULT_LINK_MS)
        return float(table[place[a], place[b]])

    return rho


def client_edges(graph: LayerGraph, client_ms: Mapping[PeerId, float] | None) -> Floats | None:
    """ρ between the client and each row of `graph`, ms, `[R]`; None if they do not count."""
    if client_ms is None:
        return None
    return np.array([client_ms.get(peer, DEFAULT_LINK_MS) for peer in graph.ids])


# Explanations --------------------------------------------------------------------------------------------------------


def explain(
    chain: Chain,
    nodes: Iterable[RouteNode],
    link_ms: Links,
    source: str | None = None,
    names: Mapping[str, str] | None = None,
) -> str:
    """A chain for people: which node runs which layers, the time of each hop and link, and the sum."""
    by_id = {n.id: n for n in nodes}
    rho = links(link_ms)
    named = names or {}
    lines, total, previous = [], 0.0, source
    for number, hop in enumerate(chain.hops, 1):
        compute = math.fsum(by_id[hop.peer].tau(layer) for layer in range(hop.start, hop.end))
        link = rho(previous, hop.peer) if previous is not None else 0.0
        reached = f" after {link:.1f} ms on the link" if previous is not None else ""
        who = named.get(hop.peer) or hop.peer
        lines.append(f"hop {number}: {who} runs layers {hop.start}:{hop.end} in {compute:.1f} ms{reached}")
        total += link + compute
        previous = hop.peer
    if source is not None and previous is not None:
        total += rho(previous, source)
        lines.append(f"and {rho(previous, source):.1f} ms back to the client")
    lines.append(f"in all {total:.1f} ms a token")
    return "\n".join(lines)


def explain_snapshot(
    chain: Chain,
    snapshot: Snapshot,
    client_ms: Mapping[PeerId, float] | None = None,
    rules: ChainRules = ChainRules(),
) -> str:
    """`explain` for a chain of `route_snapshot`, with the nodes' own names, which links were not measured, and what the
    best chain without each hop's node would take.
    """
    source = CLIENT if client_ms is not None else None
    names = {n.peer: f"{n.name} ({n.peer[-6:]})" if n.name else n.peer for n in snapshot.nodes}
    lines = [explain(chain, profile_nodes(snapshot.nodes), snapshot_links(snapshot, client_ms), source, names)]
    estimated = [
        f"{names[a.peer]} -> {names[b.peer]} ({how})"
        for a, b in itertools.pairwise(chain.hops)
        if (how := _link_origin(snapshot.node(a.peer), snapshot.node(b.peer))) != "measured"
    ]
    if estimated:
        lines.append(f"links nobody has measured: {', '.join(estimated)}")
    first = snapshot.node(chain.hops[0].peer)
    if first is not None:
        table = RouteTable(snapshot, dtype=first.dtype, weight_hash=first.weight_hash, rules=rules)
        for hop in chain.hops:
            try:
                other = table.route(client_ms=client_ms, banned={hop.peer})
                lines.append(f"without {names[hop.peer]} it would be {other.cost_ms:.1f} ms, over {len(other)} nodes")
            except NoRoute:
                lines.append(f"without {names[hop.peer]} there would be no chain")
    return "\n".join(lines)


def _link_origin(a: NodeProfile | None, b: NodeProfile | None) -> str:
    if a is None or b is None:
        return "assumed"
    if b.peer in a.link_ms or a.peer in b.link_ms:
        return "measured"
    return (
        "estimated from coordinates"
        if a.network_coordinate and len(a.network_coordinate) == len(b.network_coordinate)
        else "assumed"
    )
