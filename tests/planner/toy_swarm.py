"""Nodes and snapshots for tests of membership: one line each."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.types import CostCurve, LayerSpan, NodeProfile, NodeState, Snapshot


def node(
    peer: str,
    capacity: int,
    span: tuple[int, int] | None = None,
    *,
    ms: float = 1.0,
    kv: int = 1000,
    state: NodeState | None = None,
    pinned: bool = False,
) -> NodeProfile:
    return NodeProfile(
        peer,
        peer,
        state or (NodeState.SERVING if span else NodeState.JOINING),
        "bf16",
        "w",
        capacity,
        LayerSpan(*span) if span else None,
        cost=CostCurve((1,), (ms,)),
        kv_capacity_tokens=kv,
        pinned=pinned,
    )


def snapshot(num_layers: int, nodes: Iterable[NodeProfile]) -> Snapshot:
    return Snapshot("m", num_layers, tuple(sorted(nodes, key=lambda n: n.peer)))
