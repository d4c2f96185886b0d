"""What a step along a chain costs, by a snapshot and the links that this client has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.routing.route import DEFAULT_LINK_MS, snapshot_rho
from swarm.types import Chain, Hop, NodeProfile, NodeState, PeerId, Snapshot


def costs_by_snapshot(chain: Chain, snapshot: Snapshot, client_ms: Mapping[PeerId, float]) -> ChainCosts:
    """`client_ms`: ρ between this client and the nodes it has measured, one way. A node that is not in `snapshot` gets
    the default costs."""
    nodes = [snapshot.node(hop.peer) or _unknown(hop) for hop in chain.hops]
    index = {node.peer: i for i, node in enumerate(nodes)}
    rho = snapshot_rho(nodes)

    def link_ms(a: PeerId, b: PeerId) -> float:
        if not a or not b:
            return client_ms.get(a or b, DEFAULT_LINK_MS)
        return float(rho[index[a], index[b]])

    return ChainCosts.of(chain, replace(snapshot, nodes=tuple(nodes)), link_ms)


def _unknown(hop: Hop) -> NodeProfile:
    return NodeProfile(hop.peer, "", NodeState.SERVING, "", "", len(hop.span), hop.span)
