"""Why a chain was chosen, and why there is none, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.errors import NoRoute, WrongModel
from swarm.planner.routing.route import explain_snapshot
from swarm.planner.routing.rules import ChainRules
from swarm.planner.trust.belief import PeerBelief
from swarm.planner.trust.evidence import UNKNOWN
from swarm.types import Chain, PeerId, Snapshot


def explain_chain(
    chain: Chain,
    seen: Snapshot,
    announced: int,
    client_ms: Mapping[PeerId, float],
    beliefs: Mapping[PeerId, PeerBelief],
    rules: ChainRules,
    kept: Sequence[str],
) -> str:
    """`seen`: the nodes that it was searched among, of so many `announced`. `kept`: sentences on `rules`."""
    told = [f"{p[-6:]}: {b.reason}" for p in chain.peers if (b := beliefs.get(p)) and b.evidence != UNKNOWN]
    among = f"searched among {len(seen.nodes)} nodes that answer, of {announced} that are announced"
    return "\n".join((explain_snapshot(chain, seen, client_ms, rules), *kept, among, *told))


def explain_no_route(snapshot: Snapshot, error: NoRoute, weight_hash: str, dtype: str | None) -> NoRoute | WrongModel:
    """What is really missing: any nodes, nodes with our weights or of our dtype, or what `error` says: layers, or a
    chain that keeps a rule."""
    serving, model = snapshot.serving(), snapshot.model
    if not serving:
        waiting = len(snapshot.nodes)
        state = f"; {waiting} are still loading" if waiting else ""
        return NoRoute(f"no node of this swarm serves the model '{model}'{state}", error.missing)
    same = [n for n in serving if n.weight_hash == weight_hash]
    if not same:
        return WrongModel(
            f"{len(serving)} nodes serve '{model}' with other weights than yours; "
            "name the model file they use with --model"
        )
    if dtype is not None and all(n.dtype != dtype for n in same):
        served = ", ".join(sorted({n.dtype for n in same}))
        return NoRoute(f"no node serves '{model}' in {dtype}; there is {served}", error.missing)
    return error
