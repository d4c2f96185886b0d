"""Parallax phase 2 (§3.3): the cheapest chain through the layer DAG, and why it is the cheapest.

Owns what a chain costs and which one a client should take. Knows neither where profiles come from (`records`,
`net.directory`) nor how a session runs along a chain (`plan.session`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.errors import NoRoute
from swarm.types import Chain, Hop, LayerSpan, NodeProfile, PeerId, Snapshot, coverage, missing_ranges

Objective = Literal["latency", "bottleneck"]
Links = Callable[[str, str], float] | Mapping[str, Mapping[str, float]]

DEFAULT_LINK_MS = 50.0  # between two peers of which nothing is known; half a transcontinental round trip


@dataclass(frozen=True, slots=True)
class RouteNode:
    """A node as phase 2 sees it: layers `[start, end)` and τ in ms, queue included.

    `layer_ms`: one number for all layers, or one per layer of the span (or of the model, indexed by layer).
    """

    id: str
    start: int
    end: int
    layer_ms: float | Sequence[float]

    def tau(self, layer: int) -> float:
        """τ of one layer of the span, ms."""
        if isinstance(self.layer_ms, int | float):
            return float(self.layer_ms)
        local = len(self.layer_ms) == self.end - self.start
        return float(self.layer_ms[layer - self.start if local else layer])


def route(
    nodes: Iterable[RouteNode],
    num_layers: int,
    link_ms: Links,
    objective: Objective = "latency",
    banned: Collection[str] = frozenset(),
    source: str | None = None,
) -> Chain:
    """The best chain over `[0, num_layers)`.

    Cost of a chain, ms: "latency" is the sum of τ over every layer of every hop plus ρ between consecutive hops;
    "bottleneck" is the largest sum of τ in one hop (links carry many steps at once, so they do not bound a
    pipeline), and among chains with that bottleneck the one of the least latency. Ties: fewer hops, then the lower ids.
    `link_ms` is ρ, one way, not necessarily symmetric; a pair that a mapping leaves out is read in the other direction,
    and costs nothing if that is missing too. `source` names the client in `link_ms`: then the edges client -> first hop
    and tail -> client count as well.

    Raises NoRoute with the layers nobody serves, UsageError for a τ or ρ that is no number of ms.
    """
    usable = sorted((n for n in nodes if n.id not in banned), key=lambda n: n.id)
    missing = missing_ranges(coverage((LayerSpan(n.start, n.end) for n in usable), num_layers))
    if missing:
        raise NoRoute(no_route_sentence(missing, num_layers), missing)
    rho = links(link_ms)
    limit = math.inf
    if objective == "bottleneck":
        limit = _least_bottleneck(usable, num_layers)
    best: dict[tuple[int, str], tuple[float, int, tuple[Hop, ...]]] = {}  # (layer, node): cost to go, hops, the hops
    for start in reversed(range(num_layers)):
        for node in usable:
            if not node.start <= start < node.end:
                continue
            spent = 0.0
            options: list[tuple[float, int, tuple[Hop, ...]]] = []
            for end in range(start + 1, min(node.end, num_layers) + 1):
                spent += node.tau(end - 1)
                if spent > limit:
                    break
                hop = Hop(node.id, start, end)
                if end == num_layers:
                    options.append((spent + (rho(node.id, source) if source is not None else 0.0), 1, (hop,)))
                    continue
                for other in usable:
                    tail = best.get((end, other.id))
                    if tail is not None and other.id != node.id:
                        options.append((spent + rho(node.id, other.id) + tail[0], tail[1] + 1, (hop, *tail[2])))
            if options:
                best[start, node.id] = min(options, key=_order)
    starts = [
        (best[0, n.id][0] + (rho(source, n.id) if source is not None else 0.0), *best[0, n.id][1:])
        for n in usable
        if (0, n.id) in best
    ]
    if not starts:
        raise NoRoute("the nodes hold every layer, but no usable links join them into a chain")
    cost, _, hops = min(starts, key=_order)
    if objective == "bottleneck":
        cost = limit
    return Chain(hops, cost)


def _order(option: tuple[float, int, tuple[Hop, ...]]) -> tuple[float, int, tuple[str, ...], tuple[int, ...]]:
    cost, hops, path = option
    return round(cost, 6), hops, tuple(h.peer for h in path), tuple(-h.end for h in path)


def _least_bottleneck(nodes: Sequence[RouteNode], num_layers: int) -> float:
    reach = [0.0] + [math.inf] * num_layers  # least bottleneck of a cover of [0, layer)
    for start in range(num_layers):
        for node in nodes:
            if node.start <= start < node.end:
                spent = 0.0
                for end in range(start + 1, min(node.end, num_layers) + 1):
                    spent += node.tau(end - 1)
                    reach[end] = min(reach[end], max(reach[start], spent))
    return reach[num_layers]


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
    """The best chain over the serving nodes of `snapshot`.

    A chain never mixes weight hashes or dtypes; among the groups that can answer (restricted by `dtype` and
    `weight_hash` if given) the cheapest wins. `client_ms`: ρ between this client and the nodes it has measured, one
    way; given, the edges to the first hop and from the tail count. `min_free_tokens`: leave out nodes that say they
    have less KV room than that. Raises NoRoute.
    """
    groups: dict[tuple[str, str], list[NodeProfile]] = {}
    for node in snapshot.serving():
        if dtype not in (None, node.dtype) or weight_hash not in (None, node.weight_hash) or node.peer in banned:
            continue
        if node.kv_capacity_tokens and node.kv_free_tokens < min_free_tokens:
            continue
        groups.setdefault((node.weight_hash, node.dtype), []).append(node)
    rho = snapshot_links(snapshot, client_ms)
    chains: list[Chain] = []
    refusals: list[NoRoute] = []
    for _, members in sorted(groups.items()):
        try:
            source = CLIENT if client_ms is not None else None
            chains.append(route(profile_nodes(members), snapshot.num_layers, rho, objective, source=source))
        except NoRoute as error:
            refusals.append(error)
    if chains:
        return min(chains, key=lambda c: (round(c.cost_ms, 6), len(c), c.peers))
    if refusals:
        raise min(refusals, key=lambda e: sum(end - start for start, end in e.missing))
    whole = ((0, snapshot.num_layers),)
    raise NoRoute(no_route_sentence(whole, snapshot.num_layers), whole)


CLIENT = ""
"""The client's name in `snapshot_links`; no peer id is empty."""


def snapshot_links(
    snapshot: Snapshot, client_ms: Mapping[PeerId, float] | None = None
) -> Callable[[PeerId, PeerId], float]:
    """ρ in ms: measured by the sender, else estimated from network coordinates, else `DEFAULT_LINK_MS`."""
    nodes = {n.peer: n for n in snapshot.nodes}
    from_client = client_ms or {}

    def rho(a: PeerId, b: PeerId) -> float:
        if CLIENT in (a, b):
            return from_client.get(b or a, DEFAULT_LINK_MS)
        here, there = nodes[a], nodes[b]
        measured = here.link_ms.get(b)
        if measured is not None:
            return measured
        if here.coordinate and len(here.coordinate) == len(there.coordinate):
            return math.dist(here.coordinate, there.coordinate)
        return DEFAULT_LINK_MS

    return rho


def profile_nodes(profiles: Iterable[NodeProfile]) -> list[RouteNode]:
    """The profiles that have a span, as phase 2 sees them; τ not yet measured is read off the cost curve."""
    return [
        RouteNode(p.peer, p.span.start, p.span.end, p.layer_ms if len(p.layer_ms) == len(p.span) else p.cost.at(1))
        for p in profiles
        if p.span is not None
    ]


def links(link_ms: Links) -> Callable[[str, str], float]:
    """ρ as a function; see `route` for pairs that a mapping leaves out."""
    if not isinstance(link_ms, Mapping):
        return link_ms
    table = link_ms

    def rho(a: str, b: str) -> float:
        return table.get(a, {}).get(b, table.get(b, {}).get(a, 0.0))

    return rho


def no_route_sentence(missing: Iterable[tuple[int, int]], num_layers: int) -> str:
    """Which layers keep an answer from being possible, for people."""
    ranges = ", ".join(f"{a}:{b}" for a, b in missing)
    return f"no node serves layers {ranges} of {num_layers}; wait for one to join, or start one with: swarm-node join"


def explain(
    chain: Chain,
    nodes: Iterable[RouteNode],
    link_ms: Links,
    source: str | None = None,
    names: Mapping[str, str] | None = None,
) -> str:
    """A chain in plain words: who runs what, what each hop and each link costs, and the sum."""
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


def explain_snapshot(chain: Chain, snapshot: Snapshot, client_ms: Mapping[PeerId, float] | None = None) -> str:
    """`explain` for a chain of `route_snapshot`, with the nodes' own names."""
    source = CLIENT if client_ms is not None else None
    names = {n.peer: f"{n.name} ({n.peer[-6:]})" if n.name else n.peer for n in snapshot.nodes}
    return explain(chain, profile_nodes(snapshot.nodes), snapshot_links(snapshot, client_ms), source, names)
