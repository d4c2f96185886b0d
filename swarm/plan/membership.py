"""Parallax §3.4, the local half: which layers a joining node takes.

Owns the join rule and how nodes that join together share the model. Knows neither sockets nor clocks; a node calls it
with the snapshot it has read, and every node that has read the same snapshot gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.errors import UsageError
from swarm.types import LayerSpan, NodeProfile, NodeState, PeerId, Snapshot, missing_ranges


def join_span(layer_capacity_tokens: Sequence[float], capacity: int, *, slide: bool = False) -> LayerSpan:
    """The slice a new node should take (Parallax §3.4 i): from the bottleneck layer on, as far as its memory goes.

    `layer_capacity_tokens`: KV tokens that all nodes together hold for each layer, `[num_layers]`; the bottleneck is
    the smallest, on ties the lowest layer. `capacity`: layers the new node can hold.

    A slice that meets the end of the model is cut there, as in the paper: what is not spent on weights is KV room for
    the very layers that lack it. With `slide` it moves left instead and keeps its length, so that a node that can
    hold the whole model serves the whole model. Raises UsageError.
    """
    num_layers = len(layer_capacity_tokens)
    if num_layers == 0:
        raise UsageError("a model without layers cannot be joined")
    if capacity < 1:
        raise UsageError(f"a node with room for {capacity} layers cannot join; it needs memory for at least one")
    start = min(range(num_layers), key=lambda layer: (layer_capacity_tokens[layer], layer))
    end = min(start + capacity, num_layers)
    return LayerSpan(max(0, end - capacity) if slide else start, end)


def layer_capacity_tokens(profiles: Iterable[NodeProfile], num_layers: int) -> list[float]:
    """KV tokens held for each layer by the nodes that serve or load it, `[num_layers]`.

    A node that has not said how much counts as one token, so that a layer somebody holds is never taken for a gap.
    """
    tokens = [0.0] * num_layers
    for node in profiles:
        if node.span is not None and node.state in (NodeState.SERVING, NodeState.LOADING):
            for layer in range(node.span.start, min(node.span.end, num_layers)):
                tokens[layer] += max(node.kv_capacity_tokens, 1)
    return tokens


def place_joiners(snapshot: Snapshot) -> dict[PeerId, LayerSpan]:
    """A span for every node that has measured itself and chosen none, the same for every reader of this snapshot.

    Coverage first, then fewest stages, then balance: each gap (layers that no serving or loading node holds) is
    filled by the fewest joiners that can do it (the smallest one that holds it all, else the largest first, then lower
    peer id), who share it in proportion to speed as far as memory allows. If all of them together cannot, each takes
    all it can. Those left over join at the bottleneck one after the other in order of peer id, each seeing the ones
    before it; their slice keeps its length at the end of the model.
    """
    waiting = sorted(
        (n for n in snapshot.nodes if n.state is NodeState.JOINING and n.span is None and n.layer_capacity > 0),
        key=lambda n: n.peer,
    )
    tokens = layer_capacity_tokens(snapshot.nodes, snapshot.num_layers)
    placed: dict[PeerId, LayerSpan] = {}
    for start, end in missing_ranges(1 if t > 0 else 0 for t in tokens):
        team = _fewest(waiting, end - start)
        for node, span in zip(team, _share(team, start, end), strict=True):
            placed[node.peer] = span
            _add(tokens, node, span)
        waiting = [n for n in waiting if n.peer not in placed]
    for node in waiting:
        span = join_span(tokens, node.layer_capacity, slide=True)
        placed[node.peer] = span
        _add(tokens, node, span)
    return placed


def _add(tokens: list[float], node: NodeProfile, span: LayerSpan) -> None:
    for layer in span:
        tokens[layer] += max(node.kv_capacity_tokens, 1)


def _fewest(waiting: Sequence[NodeProfile], layers: int) -> list[NodeProfile]:
    """The fewest nodes that hold `layers` together, or as many as there are."""
    enough = [n for n in waiting if n.layer_capacity >= layers]
    if enough:
        return [min(enough, key=lambda n: (n.layer_capacity, n.peer))]
    team: list[NodeProfile] = []
    for node in sorted(waiting, key=lambda n: (-n.layer_capacity, n.peer)):
        if sum(n.layer_capacity for n in team) < layers:
            team.append(node)
    return sorted(team, key=lambda n: n.peer)


def _share(team: Sequence[NodeProfile], start: int, end: int) -> list[LayerSpan]:
    """Contiguous shares of `[start, end)`: layer by layer to the node whose share would take least time."""
    counts = [0] * len(team)
    for _ in range(min(end - start, sum(n.layer_capacity for n in team))):
        counts[
            min(
                (i for i, n in enumerate(team) if counts[i] < n.layer_capacity),
                key=lambda i: ((counts[i] + 1) * team[i].cost.at(1), i),
            )
        ] += 1
    spans = []
    for i in range(len(team)):
        spans.append(LayerSpan(start, start + max(1, counts[i])))
        start += counts[i]
    return spans
