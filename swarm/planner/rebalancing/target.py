"""Parallax §3.4 (iii): the target allocation of the whole swarm.

Owns the target, which every node computes alike from the same snapshot. Knows neither when it is needed (`imbalance`,
`rebalancer`) nor in which order nodes move (`migration`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations

from swarm.errors import Infeasible
from swarm.planner.placement.allocation import Objective, allocate
from swarm.planner.placement.join import join_span, layer_capacity_tokens, place_joiners
from swarm.planner.placement.water_filling import PoolNode
from swarm.planner.rebalancing.imbalance import ImbalanceVerdict, judge_spans, speed
from swarm.planner.rebalancing.migration import (
    MigrationPlan,
    layers_to_load,
    list_moves,
    migration_plan,
    relabel_equivalent,
)
from swarm.planner.rebalancing.policy import POLICY
from swarm.planner.routing.route import DEFAULT_LINK_MS
from swarm.types import Hop, LayerSpan, NodeProfile, NodeState, PeerId, Snapshot, coverage, missing_ranges


@dataclass(frozen=True, slots=True)
class TargetAllocation:
    """`spans`: of all nodes that take part; `before`, `after`: the imbalance now and then."""

    spans: Mapping[PeerId, LayerSpan]
    plan: MigrationPlan
    before: ImbalanceVerdict
    after: ImbalanceVerdict


def target_allocation(
    snapshot: Snapshot, alpha: float = POLICY.alpha, threshold: float = POLICY.threshold
) -> TargetAllocation:
    """Phase 1 over all nodes that can move, then the fewest moves that get there; the same for all readers.

    `snapshot`: nodes of one weight hash and dtype. Departing ones are left out, `pinned` ones stay. A node that
    phase 1 has no use for stays too, or joins at the bottleneck. If the nodes that can move do not hold the model
    without those that cannot, they fill the gaps as if they all joined now. Raises Infeasible if that leaves a gap.
    """
    num_layers = snapshot.num_layers
    nodes = {n.peer: n for n in snapshot.nodes if not n.departing}
    now = {peer: n.span for peer, n in nodes.items() if n.span is not None}
    movable = {peer: n for peer, n in nodes.items() if not n.pinned and n.layer_capacity > 0}
    fixed = {peer: span for peer, span in now.items() if peer not in movable}
    try:
        target: Mapping[PeerId, LayerSpan | None] = _allocated(movable, now, num_layers)
    except Infeasible:
        target = _repack_around_fixed(snapshot, movable, fixed)
    alike = {peer: (n.region, round(math.log(speed(n), 1.3))) for peer, n in movable.items()}
    capacity = {peer: max(n.layer_capacity, len(n.span) if n.span else 0) for peer, n in nodes.items()}
    spans = {**fixed, **relabel_equivalent(now, target, alike, capacity)}
    for peer in sorted(set(movable) - set(spans)):
        held = [replace(nodes[p], span=span, state=NodeState.SERVING) for p, span in spans.items()]
        spans[peer] = join_span(layer_capacity_tokens(held, num_layers), movable[peer].layer_capacity, slide=True)
    serving = {peer: span for peer, span in now.items() if nodes[peer].serving}
    loading = {peer: span for peer, span in now.items() if peer not in serving}
    return TargetAllocation(
        spans=dict(sorted(spans.items())),
        plan=migration_plan(serving, list_moves(now, spans, capacity), num_layers, loading),
        before=judge_spans(nodes, now, num_layers, alpha, threshold),
        after=judge_spans(nodes, spans, num_layers, alpha, threshold),
    )


def _allocated(
    movable: Mapping[PeerId, NodeProfile], now: Mapping[PeerId, LayerSpan], num_layers: int
) -> dict[PeerId, LayerSpan | None]:
    """Phase 1; None for a node it has no use for. Raises Infeasible."""
    pool = [PoolNode(n.peer, min(n.layer_capacity, num_layers), speed(n), n.region) for n in movable.values()]
    if not pool:
        raise Infeasible("no node can be moved")
    hops = [ms for n in movable.values() for peer, ms in sorted(n.link_ms.items()) if peer in movable]
    objective = Objective(
        compute_ms=_two_digits(num_layers * math.fsum(1000.0 / node.compute for node in pool) / len(pool)),
        hop_ms=_two_digits(math.fsum(hops) / len(hops) if hops else DEFAULT_LINK_MS),
    )
    target: dict[PeerId, LayerSpan | None] = dict.fromkeys(movable)
    for replica in allocate(num_layers, pool, objective).replicas:
        target.update(_in_place(replica, now))
    return target


def _two_digits(value: float) -> float:
    """To two digits, so that measurement noise changes no plan."""
    return float(f"{value:.1e}")


def _in_place(replica: Sequence[Hop], now: Mapping[PeerId, LayerSpan]) -> dict[PeerId, LayerSpan]:
    """The nodes of a replica in the order in which they have the fewest layers to load; shares are unchanged."""
    shares = {hop.peer: hop.end - hop.start for hop in replica}
    by_place = sorted(shares, key=lambda peer: (sum(now[peer]) / len(now[peer]) if peer in now else 0.0, peer))
    few = len(shares) <= POLICY.max_permuted_nodes
    orders = permutations(sorted(shares)) if few else iter([tuple(shares), tuple(by_place)])

    def laid_out(order: Sequence[PeerId]) -> dict[PeerId, LayerSpan]:
        ends = accumulate(shares[peer] for peer in order)
        return {peer: LayerSpan(end - shares[peer], end) for peer, end in zip(order, ends, strict=True)}

    return min(map(laid_out, orders), key=lambda spans: sum(layers_to_load(now.get(p), s) for p, s in spans.items()))


def _repack_around_fixed(
    snapshot: Snapshot, movable: Mapping[PeerId, NodeProfile], fixed: Mapping[PeerId, LayerSpan]
) -> dict[PeerId, LayerSpan | None]:
    """All nodes that can move join again around those that cannot. Raises Infeasible if a layer remains uncovered."""
    joining = [replace(n, span=None, state=NodeState.JOINING) for n in movable.values()]
    staying = [n for n in snapshot.nodes if n.peer in fixed and not n.departing]
    nodes = tuple(sorted((*joining, *staying), key=lambda n: n.peer))
    placed = place_joiners(replace(snapshot, nodes=nodes))
    missing = missing_ranges(coverage((*placed.values(), *fixed.values()), snapshot.num_layers))
    if missing:
        ranges = ", ".join(f"{a}:{b}" for a, b in missing)
        raise Infeasible(f"the nodes together cannot hold the model; layers {ranges} would remain without one")
    return {**dict.fromkeys(movable), **placed}
