"""Other ways to the same answer: a chain around a lost hop, and chains that share nobody.

Owns what a repair keeps and what it has to rebuild. Knows neither how keys and values are rebuilt (`plan.session`, the
node) nor why a hop was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarm.errors import NoRoute
from swarm.planner.routing.dag import REBUILD_PENALTY, LayerDag
from swarm.planner.routing.graph import Floats, LayerGraph
from swarm.planner.routing.nodes import RouteNode, row_order
from swarm.planner.routing.route import RouteTable, client_edges, snapshot_rho, times_are_sane
from swarm.planner.routing.simple_paths import best_simple_path
from swarm.types import Chain, Hop, LayerSpan, NodeProfile, NodeState, PeerId, Snapshot


@dataclass(frozen=True, slots=True)
class Repair:
    """A chain that goes on where another broke.

    `kept`: hops of `chain` that were in the old chain just so. `rebuild`: layers whose keys and values must be made
    anew, and by whom. Layers in neither are had already by a node whose hop has changed (only with `resize`).
    """

    chain: Chain
    kept: tuple[Hop, ...]
    rebuild: tuple[Hop, ...]

    @property
    def layers(self) -> int:
        """How many layers must be rebuilt."""
        return sum(hop.end - hop.start for hop in self.rebuild)


def repair(
    table: RouteTable,
    chain: Chain,
    lost: Collection[PeerId],
    *,
    client_ms: Mapping[PeerId, float] | None = None,
    banned: Collection[PeerId] = frozenset(),
    resize: bool = False,
) -> Repair:
    """The chain that replaces `chain` without its `lost` peers: fewest layers to rebuild, then least latency.

    The other hops are kept as they are, also where their nodes drain, are full or are late with their records. A
    session's layers at a node are fixed when it is opened, so a hop that takes more or fewer layers starts from
    nothing; with `resize` it only makes the layers it did not have. `banned`: peers that may keep their hops but get no
    new ones. Exact while the budget of `best_simple_path` lasts. Raises NoRoute.
    """
    survivors = {hop.peer: hop for hop in chain.hops if hop.peer not in lost}
    own = {(n.weight_hash, n.dtype) for peer in chain.peers if (n := table.snapshot.node(peer))}
    repairs: list[Repair] = []
    refusals: list[NoRoute] = []
    out = {*lost, *banned}
    for key, graph in table.graphs.items():
        if own and key not in own:
            continue
        rows = zip(table.groups[key], graph.nodes, strict=True)  # both in the order of their spans
        fresh = [_Candidate(profile, node) for profile, node in rows if profile.peer not in out]
        try:
            repairs.append(_repair(table.snapshot, graph, fresh, survivors, client_ms, resize))
        except NoRoute as error:
            refusals.append(error)
    if repairs:
        return min(repairs, key=lambda r: (r.layers, round(r.chain.cost_ms, 6), r.chain.peers))
    raise table.refusal(refusals)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One way to use a peer. `had`: layers whose keys and values it holds; `whole`: it keeps just these as they are."""

    profile: NodeProfile
    node: RouteNode
    kv_span: LayerSpan | None = None
    keep_exactly: bool = False


def _route_node(profile: NodeProfile, span: LayerSpan) -> RouteNode:
    measured = profile.span is not None and len(profile.layer_ms) == len(profile.span)
    if profile.span is not None and measured and profile.span.start <= span.start and span.end <= profile.span.end:
        first = span.start - profile.span.start
        return RouteNode(profile.peer, span.start, span.end, profile.layer_ms[first : first + len(span)])
    return RouteNode(profile.peer, span.start, span.end, profile.cost.ms_at(1))


def _repair(
    snapshot: Snapshot,
    table: LayerGraph,
    fresh: Sequence[_Candidate],
    survivors: Mapping[PeerId, Hop],
    client_ms: Mapping[PeerId, float] | None,
    resize: bool,
) -> Repair:
    """The best repair within one group, of which `table` is the graph. Tries first what rebuilds only lost layers."""
    strangers = [row for row in fresh if row.profile.peer not in survivors]
    again = [row for row in fresh if row.profile.peer in survivors]
    if resize:
        stretched = [replace(row, kv_span=survivors[row.profile.peer].span) for row in again]
        fixed = [_kept(snapshot, h) for h in survivors.values() if h.peer not in {r.profile.peer for r in again}]
        plans = [[*strangers, *stretched, *fixed], [*strangers, *again]]
    else:
        fixed = [_kept(snapshot, hop) for hop in survivors.values()]
        plans = [[*strangers, *fixed], [*strangers, *again, *fixed], [*strangers, *again]]
    lost_layers = snapshot.num_layers - sum(hop.end - hop.start for hop in survivors.values())
    best: Repair | None = None
    refusal: NoRoute | None = None
    for plan in plans:
        try:
            found = _solve(table, plan, client_ms)
        except NoRoute as error:
            refusal = error
            continue
        if best is None or (found.layers, found.chain.cost_ms) < (best.layers, best.chain.cost_ms):
            best = found
        if best.layers <= lost_layers:
            break
    if best is None:
        raise refusal or NoRoute("there is nobody left to go on with")
    return best


def _kept(snapshot: Snapshot, hop: Hop) -> _Candidate:
    profile = snapshot.node(hop.peer)
    if profile is None or not times_are_sane(profile):  # no news of it, but its session lives
        profile = NodeProfile(hop.peer, "", NodeState.SERVING, "", "", len(hop.span), hop.span)
    return _Candidate(profile, _route_node(profile, hop.span), hop.span, keep_exactly=True)


def _solve(table: LayerGraph, rows: Sequence[_Candidate], client_ms: Mapping[PeerId, float] | None) -> Repair:
    num_layers = table.num_layers
    rows = sorted(rows, key=lambda row: row_order(row.node))
    graph = LayerGraph([row.node for row in rows], num_layers, _rho(table, rows))
    graph.check_coverage(np.arange(len(rows)))
    new = graph.dag.holds.copy()  # layers that would have to be made anew, [L, R]
    may_enter = np.ones((num_layers + 1, len(rows)), np.bool_)
    may_leave = may_enter.copy()
    for i, row in enumerate(rows):
        if row.kv_span is not None:
            new[row.kv_span.start : row.kv_span.end, i] = False
        if row.keep_exactly:
            may_enter[:, i] = np.arange(num_layers + 1) == row.node.start
            may_leave[:, i] = np.arange(num_layers + 1) == row.node.end
    tau = graph.dag.tau + np.where(new, REBUILD_PENALTY, 0)
    edges = client_edges(graph, client_ms)
    edge_ms = np.zeros(len(rows)) if edges is None else edges
    ticks = graph.ticks(edge_ms)
    path = best_simple_path(LayerDag(graph.owner, tau, graph.dag.rho, may_enter, may_leave), ticks, ticks)
    if path is None:
        raise NoRoute("the nodes left hold every layer, but no chain through them was found")
    chain = graph.chain(path, np.arange(len(rows)), "latency", edge_ms, edge_ms)
    used = [(rows[visit.row], hop) for visit, hop in zip(path.visits, chain.hops, strict=True)]
    kept = tuple(hop for row, hop in used if row.kv_span == hop.span)
    rebuild = [part for row, hop in used for part in _layers_to_rebuild(hop, row.kv_span)]
    return Repair(chain, kept, tuple(rebuild))


def _rho(table: LayerGraph, rows: Sequence[_Candidate]) -> Floats:
    """ρ between all rows in ms, `[R, R]`; out of the table, unless it lacks a node that a hop is kept of."""
    peers = {row.profile.peer: row.profile for row in rows}
    place = {peer: i for i, peer in enumerate(table.ids)}
    rho = table.rho_ms
    if not place.keys() >= peers.keys():
        place, rho = {peer: i for i, peer in enumerate(peers)}, snapshot_rho(list(peers.values()))
    at = np.array([place[row.profile.peer] for row in rows], np.int64)
    return rho.take(at, axis=0).take(at, axis=1)


def _layers_to_rebuild(hop: Hop, had: LayerSpan | None) -> Iterator[Hop]:
    """The parts of `hop` outside `had`."""
    if had is None or hop.end <= had.start or had.end <= hop.start:
        yield hop
        return
    if hop.start < had.start:
        yield Hop(hop.peer, hop.start, had.start)
    if had.end < hop.end:
        yield Hop(hop.peer, had.end, hop.end)
