"""Load-aware node times for one client, so that clients that arrive together do not all take the same replica.

HypSched-RT (Hyperion, §IV-B) sends a request to the replica that completes it first, counting the work that waits
there. A node's record counts its sessions; its τ includes their cost only once they run. Clients that read the same
snapshot before any of them shows in it would still agree, so each adds a small jitter of its own. Knows neither routes
nor clocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swarm.planner.routing.policy import POLICY, RoutingPolicy
from swarm.types import CostCurve, NodeProfile, PeerId, Snapshot


def spread_load(snapshot: Snapshot, client: PeerId, policy: RoutingPolicy = POLICY) -> Snapshot:
    """`snapshot` with τ of every node as `client` should expect it."""
    return replace(snapshot, nodes=tuple(_loaded(node, client, policy) for node in snapshot.nodes))


def _loaded(node: NodeProfile, client: PeerId, policy: RoutingPolicy) -> NodeProfile:
    jitter = int.from_bytes(hashlib.blake2b(f"{client} {node.peer}".encode(), digest_size=4).digest()) / 2**32
    factor = 1.0 + policy.load_per_session * node.sessions + policy.tie_jitter * jitter
    cost = CostCurve(node.cost.widths, tuple(ms * factor for ms in node.cost.ms))
    return replace(node, layer_ms=tuple(ms * factor for ms in node.layer_ms), cost=cost)
