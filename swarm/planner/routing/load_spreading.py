"""The live map as one client should read it, so that clients that arrive together do not all take the same replica.

HypSched-RT (Hyperion, §IV-B) sends a request to the replica that completes it first, counting the work that waits
there. A node's record says how many sessions it has; its τ says what they cost once they run, which they may not have
begun to. Clients that read the same map before any of them shows on it would still agree, so each leans a little its
own way. Owns these two weights; knows neither routes nor clocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swarm.types import CostCurve, NodeProfile, PeerId, Snapshot

LOAD_PER_SESSION = 0.25  # of τ: what one more session in the batch costs the others
TIE_JITTER = 0.1  # of τ, at most: enough to tell equals apart, too little to send anybody the long way


def spread_load(snapshot: Snapshot, client: PeerId) -> Snapshot:
    """`snapshot` with τ of every node as `client` should expect it."""
    return replace(snapshot, nodes=tuple(_loaded(node, client) for node in snapshot.nodes))


def _loaded(node: NodeProfile, client: PeerId) -> NodeProfile:
    leaning = int.from_bytes(hashlib.blake2b(f"{client} {node.peer}".encode(), digest_size=4).digest()) / 2**32
    factor = 1.0 + LOAD_PER_SESSION * node.sessions + TIE_JITTER * leaning
    cost = CostCurve(node.cost.widths, tuple(ms * factor for ms in node.cost.ms))
    return replace(node, layer_ms=tuple(ms * factor for ms in node.layer_ms), cost=cost)
