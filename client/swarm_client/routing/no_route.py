"""Why no chain leads through the swarm, for people. Pure."""

from __future__ import annotations

from swarm.errors import NoRoute, WrongModel
from swarm.types import Snapshot


def explain_no_route(snapshot: Snapshot, error: NoRoute, weight_hash: str, dtype: str | None) -> NoRoute | WrongModel:
    """What is really missing: any nodes, nodes with our weights, nodes of our dtype, or layers."""
    serving = snapshot.serving()
    if not serving:
        waiting = len(snapshot.nodes)
        state = f"; {waiting} are still loading" if waiting else ""
        return NoRoute(f"no node of this swarm serves the model '{snapshot.model}'{state}", error.missing)
    same = [n for n in serving if n.weight_hash == weight_hash]
    if not same:
        return WrongModel(
            f"{len(serving)} nodes serve '{snapshot.model}' with other weights than yours; "
            "name the model file they use with --model"
        )
    if dtype is not None and all(n.dtype != dtype for n in same):
        served = ", ".join(sorted({n.dtype for n in same}))
        return NoRoute(f"no node serves '{snapshot.model}' in {dtype}; there is {served}", error.missing)
    return error
