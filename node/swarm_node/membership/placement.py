"""Which layers this node takes, and the sentence that gives the reason.

Owns the reasons, and the check that a choice is still valid once the weights are read. The rule itself is in
`swarm.planner.placement.join`. Pure: snapshots in, spans out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm.errors import UsageError
from swarm.planner.placement.join import place_joiners
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot, coverage, missing_ranges


@dataclass(frozen=True, slots=True)
class Placement:
    """`seen`: the swarm that the choice follows from; None for a manual placement."""

    span: LayerSpan
    reason: str
    seen: Snapshot | None = None


def compatible(snapshot: Snapshot, me: NodeProfile) -> Snapshot:
    """The nodes that could be in one chain with this one, itself as it describes itself now."""
    others = (n for n in snapshot.nodes if n.peer != me.peer)
    same = (n for n in others if n.weight_hash == me.weight_hash and n.dtype == me.dtype)
    return replace(snapshot, nodes=tuple(sorted((*same, me), key=lambda n: n.peer)))


def manual_span(layers: str, num_layers: int) -> Placement:
    """The span of `--layers`. Raises UsageError."""
    span = LayerSpan.parse(layers)
    if span.end > num_layers:
        raise UsageError(f"--layers {span} exceeds the model's {num_layers} layers")
    return Placement(span, f"layers {span}, as set by --layers")


def choose(snapshot: Snapshot, me: NodeProfile) -> Placement:
    """The span the join rule gives to this node, which is joining."""
    view = compatible(snapshot, me)
    span = place_joiners(view)[me.peer]
    gaps = missing_ranges(coverage((n.span for n in _holding(view.nodes) if n.span), view.num_layers))
    gap = next(((a, b) for a, b in gaps if a < span.end and span.start < b), None)
    if gap is not None:
        sharing = sum(1 for n in view.nodes if n.state is NodeState.JOINING)
        shared = f", shared with {sharing - 1} more that join now" if sharing > 1 else ""
        return Placement(span, f"layers {span}, because nobody serves {gap[0]}:{gap[1]}{shared}", view)
    if len(span) == view.num_layers:
        return Placement(span, f"layers {span}, the whole model, because it fits into this node's memory", view)
    return Placement(span, f"layers {span}, because the swarm has the least room for sessions there", view)


def still_valid(snapshot: Snapshot, me: NodeProfile) -> bool:
    """Whether to keep the span of `me` although others have chosen meanwhile.

    Nodes that did not see each other may have taken the same layers and left a gap elsewhere. Then those whose layers
    others hold too choose again, all but the lowest peer id, so that not all of them leave.
    """
    nodes = _holding(compatible(snapshot, me).nodes)
    if me.span is None or not missing_ranges(coverage((n.span for n in nodes if n.span), snapshot.num_layers)):
        return True
    preferred = (n for n in nodes if n.peer != me.peer and (n.state is NodeState.SERVING or n.peer < me.peer))
    covered = coverage((n.span for n in preferred if n.span), snapshot.num_layers)
    return any(covered[layer] == 0 for layer in me.span)


def _holding(nodes: Iterable[NodeProfile]) -> list[NodeProfile]:
    return [n for n in nodes if n.state in (NodeState.SERVING, NodeState.LOADING)]
