"""Repair: the chain that replaces one with lost hops.

Owns which hops a repair keeps and which layers it has to rebuild. Knows neither how KV is rebuilt (replay or KV
transfer) nor why a hop was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.errors import NoRoute
from swarm.planner.routing.dag import REBUILD_PENALTY, LayerDag
from swarm.planner.routing.graph import Floats, LayerGraph
from swarm.planner.routing.nodes import RouteNode, row_order
from swarm.planner.routing.route import RouteTable, snapshot_rho, times_are_sane
from swarm.planner.routing.simple_paths import best_simple_path
from swarm.types import Chain, Hop, NodeProfile, NodeState, PeerId, Snapshot


@dataclass(frozen=True, slots=True)
class Repair:
    """A chain that continues a broken one.

    `kept`: hops of `chain` that were in the old chain unchanged. `rebuild`: all others, whose KV must be rebuilt.
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
) -> Repair:
    """The chain that replaces `chain` without its `lost` peers: fewest layers to rebuild, then least latency.

    The other hops are kept, also where their nodes drain, are full or publish their records late. A session's layers at
    a node are fixed when it is opened, so a hop that takes more or fewer layers rebuilds all of them. `banned`: peers
    that may keep their hops but get no new ones. Exact within the limits of `best_simple_path`. Raises NoRoute.
    """
    survivors = {hop.peer: hop for hop in chain.hops if hop.peer not in lost}
    own = {(n.weight_hash, n.dtype) for peer in chain.peers if (n := table.snapshot.node(peer))}
    repairs: list[Repair] = []
    errors: list[NoRoute] = []
    out = {*lost, *banned}
    for key, graph in table.graphs.items():
        if own and key not in own:
            continue
        rows = zip(table.groups[key], graph.nodes, strict=True)  # both in the order of their spans
        fresh = [_Candidate(profile, node) for profile, node in rows if profile.peer not in out]
        try:
            repairs.append(_repair(table, graph, fresh, survivors, client_ms))
        except NoRoute as error:
            errors.append(error)
    if repairs:
        return min(repairs, key=lambda r: (r.layers, round(r.chain.cost_ms, 6), r.chain.peers))
    raise table.no_route(errors, lambda other: repair(other, chain, lost, client_ms=client_ms, banned=banned))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One way to use a peer: to open any part of its span, or to keep the hop it has unchanged."""

    profile: NodeProfile
    node: RouteNode
    kept: bool = False


def _repair(
    table: RouteTable,
    group: LayerGraph,
    fresh: Sequence[_Candidate],
    survivors: Mapping[PeerId, Hop],
    client_ms: Mapping[PeerId, float] | None,
) -> Repair:
    """The best repair within one group, of which `group` is the graph. Tries first what rebuilds only lost layers."""
    others = [row for row in fresh if row.profile.peer not in survivors]
    reopened = [row for row in fresh if row.profile.peer in survivors]
    snapshot = table.snapshot
    kept = [_kept(snapshot, hop) for hop in survivors.values()]
    plans = [[*others, *kept], [*others, *reopened, *kept], [*others, *reopened]]
    lost_layers = snapshot.num_layers - sum(hop.end - hop.start for hop in survivors.values())
    best: Repair | None = None
    failure: NoRoute | None = None
    for plan in plans:
        try:
            found = _solve(table, group, plan, client_ms)
        except NoRoute as error:
            failure = error
            continue
        if best is None or (found.layers, found.chain.cost_ms) < (best.layers, best.chain.cost_ms):
            best = found
        if best.layers <= lost_layers:
            break
    if best is None:
        raise failure or NoRoute("there is nobody left to go on with")
    return best


def _kept(snapshot: Snapshot, hop: Hop) -> _Candidate:
    profile = snapshot.node(hop.peer)
    if profile is None or not times_are_sane(profile):  # its record is missing or invalid, but its session is open
        profile = NodeProfile(hop.peer, "", NodeState.SERVING, "", "", len(hop.span), hop.span)
    return _Candidate(profile, RouteNode(hop.peer, hop.start, hop.end, _hop_ms(profile, hop)), kept=True)


def _hop_ms(profile: NodeProfile, hop: Hop) -> float | Sequence[float]:
    """τ of the layers of a hop as published, else off the cost curve: the node may serve other layers by now."""
    span = profile.span
    if span is None or len(profile.layer_ms) != len(span) or hop.start < span.start or span.end < hop.end:
        return profile.cost.ms_at(1)
    return profile.layer_ms[hop.start - span.start : hop.end - span.start]


def _solve(
    table: RouteTable, group: LayerGraph, rows: Sequence[_Candidate], client_ms: Mapping[PeerId, float] | None
) -> Repair:
    num_layers = group.num_layers
    rows = sorted(rows, key=lambda row: row_order(row.node))
    graph = LayerGraph([row.node for row in rows], num_layers, _rho(table, group, rows))
    graph.check_coverage(np.arange(len(rows)))
    rebuilt = graph.dag.holds.copy()  # layers whose KV would have to be rebuilt, [L, R]
    may_enter = np.ones((num_layers + 1, len(rows)), np.bool_)
    may_leave = may_enter.copy()
    for i, row in enumerate(rows):
        if row.kept:
            rebuilt[:, i] = False
            may_enter[:, i] = np.arange(num_layers + 1) == row.node.start
            may_leave[:, i] = np.arange(num_layers + 1) == row.node.end
    tau = graph.dag.tau + np.where(rebuilt, REBUILD_PENALTY, 0)
    entry_ms, exit_ms = table.edges(graph, client_ms)
    dag = LayerDag(graph.owner, tau, graph.dag.rho, may_enter, may_leave)
    path = best_simple_path(dag, graph.ticks(entry_ms), graph.ticks(exit_ms))
    if path is None:
        raise NoRoute("the nodes left hold every layer, but no chain through them was found")
    chain = graph.chain(path, np.arange(len(rows)), "latency", entry_ms, exit_ms)
    used = [(rows[visit.row].kept, hop) for visit, hop in zip(path.visits, chain.hops, strict=True)]
    kept, rebuild = (tuple(hop for was_kept, hop in used if was_kept is side) for side in (True, False))
    return Repair(chain, kept, rebuild)


def _rho(table: RouteTable, group: LayerGraph, rows: Sequence[_Candidate]) -> Floats:
    """ρ between all rows in ms, `[R, R]`; out of `group`, unless it lacks the node of a kept hop."""
    peers = {row.profile.peer: row.profile for row in rows}
    place = {peer: i for i, peer in enumerate(group.ids)}
    rho = group.rho_ms
    if not place.keys() >= peers.keys():
        profiles = list(peers.values())
        place, rho = {peer: i for i, peer in enumerate(peers)}, table.rules.links(profiles, snapshot_rho(profiles))
    at = np.array([place[row.profile.peer] for row in rows], np.int64)
    return rho.take(at, axis=0).take(at, axis=1)
