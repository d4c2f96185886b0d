"""Parallax §3.4, the local half: which layers a joining node takes, and what is missing when one leaves.

Owns the join rule and how nodes that join together share the model. The global half is `rebalancing`. Knows neither
sockets nor clocks; every node that has read the same snapshot gets the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from swarm.errors import UsageError
from swarm.planner.placement.water_filling import PoolNode, balance, lay_out
from swarm.types import LayerSpan, NodeProfile, NodeState, PeerId, Snapshot, coverage, missing_ranges


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

    A node that publishes no capacity counts as one token, so that a layer it holds is never taken for a gap.
    """
    tokens = [0.0] * num_layers
    for node in profiles:
        if node.span is not None and node.state in (NodeState.SERVING, NodeState.LOADING):
            for layer in range(node.span.start, min(node.span.end, num_layers)):
                tokens[layer] += max(node.kv_capacity_tokens, 1)
    return tokens


def place_joiners(snapshot: Snapshot) -> dict[PeerId, LayerSpan]:
    """A span for every node that has measured itself and chosen none, the same for every reader of this snapshot.

    Coverage first, then fewest stages, then balance. Each gap (layers that no serving or loading node holds) is filled
    by the fewest joiners that can do it: the smallest one that holds it all, which takes all it can from there on, else
    the largest first (then the lower peer id), which share it by speed as far as memory allows, in the order of their
    ids. Those left over join at the bottleneck one after the other in order of peer id, each seeing the ones before
    it; their slice keeps its length at the end of the model. If that leaves more layers uncovered than every joiner
    joining at the bottleneck with all its memory, they do that instead. A joiner's KV room, if not known yet, counts as
    the mean of the others'.
    """
    joiners = sorted(
        (n for n in snapshot.nodes if n.state is NodeState.JOINING and n.span is None and n.layer_capacity > 0),
        key=lambda n: n.peer,
    )
    shared, in_turn = _JoinPlanner(snapshot), _JoinPlanner(snapshot)
    shared.fill_gaps(joiners)
    shared.at_bottleneck(joiners)
    in_turn.at_bottleneck(joiners)
    return min((shared, in_turn), key=lambda planner: planner.tokens.count(0.0)).placed


class _JoinPlanner:
    """Joiners placed so far, and the KV tokens held for each layer with them."""

    def __init__(self, snapshot: Snapshot) -> None:
        known = [n.kv_capacity_tokens for n in snapshot.nodes if n.kv_capacity_tokens > 0]
        self._typical = sum(known) / len(known) if known else 1.0
        self.tokens = layer_capacity_tokens(snapshot.nodes, snapshot.num_layers)
        self.placed: dict[PeerId, LayerSpan] = {}

    def fill_gaps(self, joiners: Sequence[NodeProfile]) -> None:
        while gaps := missing_ranges(1 if held > 0 else 0 for held in self.tokens):
            start, end = gaps[0]
            team = _fewest([n for n in joiners if n.peer not in self.placed], end - start)
            if not team:
                return
            if len(team) == 1:
                self._place(team[0], join_span(self.tokens, team[0].layer_capacity, slide=True))
                continue
            for node, span in _shares(team, start, end):
                self._place(node, span)

    def at_bottleneck(self, joiners: Sequence[NodeProfile]) -> None:
        for node in joiners:
            if node.peer not in self.placed:
                self._place(node, join_span(self.tokens, node.layer_capacity, slide=True))

    def _place(self, node: NodeProfile, span: LayerSpan) -> None:
        self.placed[node.peer] = span
        for layer in span:
            self.tokens[layer] += node.kv_capacity_tokens or self._typical


def _fewest(waiting: Sequence[NodeProfile], layers: int) -> list[NodeProfile]:
    """The fewest nodes that hold `layers` together, or as many as there are, by peer id."""
    enough = [n for n in waiting if n.layer_capacity >= layers]
    if enough:
        return [min(enough, key=lambda n: (n.layer_capacity, n.peer))]
    team: list[NodeProfile] = []
    for node in sorted(waiting, key=lambda n: (-n.layer_capacity, n.peer)):
        if sum(n.layer_capacity for n in team) < layers:
            team.append(node)
    return sorted(team, key=lambda n: n.peer)


def _shares(team: Sequence[NodeProfile], start: int, end: int) -> list[tuple[NodeProfile, LayerSpan]]:
    """Which part of `[start, end)` each node of `team` takes; a node too slow to be given a layer takes none."""
    pool = [PoolNode(n.peer, n.layer_capacity, 1000.0 / max(n.cost.ms_at(1), 1e-3)) for n in team]
    if sum(n.layer_capacity for n in team) >= end - start:
        hops = balance(end - start, pool).spans
    else:
        hops = lay_out(pool, [n.layer_capacity for n in team])
    by_peer = {n.peer: n for n in team}
    return [(by_peer[hop.peer], LayerSpan(start + hop.start, start + hop.end)) for hop in hops]


def uncovered_without(snapshot: Snapshot, leaving: Collection[PeerId]) -> tuple[tuple[int, int], ...]:
    """Layers that serving nodes hold now and would not if `leaving` left (Parallax §3.4 ii), as half-open ranges."""
    spans = [n.span for n in snapshot.serving() if n.span is not None and n.peer not in leaving]
    after = coverage(spans, snapshot.num_layers)
    return missing_ranges(0 if now and not then else 1 for now, then in zip(snapshot.coverage(), after, strict=True))
