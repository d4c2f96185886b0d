"""Layers that are too big for a node: who leads them, who holds which of their experts, and what is missing.

Owns these rules, for models whose layers have mixtures of experts. A leader is an ordinary hop to everybody else
(`swarm.types.ExpertShare`). Knows neither sockets nor clocks; every node that has read the same snapshot gets the same
result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.planner.placement.join import place_joiners
from swarm.types import (
    ExpertShare,
    LayerSpan,
    NodeProfile,
    NodeState,
    PeerId,
    Snapshot,
    coverage,
    missing_ranges,
)

_TAKEN = (NodeState.LOADING, NodeState.WAITING, NodeState.SERVING)
"""States in which a share counts as taken."""


@dataclass(frozen=True, slots=True)
class PlacedShare:
    """`share`: what a node takes; `leads`: with all else of these layers."""

    share: ExpertShare
    leads: bool


def holders(nodes: Iterable[NodeProfile], count: int) -> tuple[NodeProfile, ...]:
    """Those that compute experts for leaders now, by peer id. `count`: experts of a layer of the model."""
    found = (n for n in nodes if n.holds_for_others and n.state in (NodeState.SERVING, NodeState.LEAVING))
    return tuple(sorted((n for n in found if n.experts and n.experts.count == count), key=lambda n: n.peer))


def missing_experts(
    layers: Iterable[int], own: ExpertShare, shares: Collection[ExpertShare]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """By layer, the half-open ranges of experts that neither we nor any of `shares` holds; layers without any are left
    out."""
    gaps = {}
    for layer in layers:
        of_layer = [share for share in shares if layer in share.layers]
        found = missing_ranges(_counts((own, *of_layer), own.count))
        if found:
            gaps[layer] = found
    return gaps


def assign_experts(
    needed: Iterable[int], candidates: Sequence[tuple[PeerId, range]]
) -> tuple[dict[PeerId, list[int]], list[int]]:
    """-> (whom to ask for which experts, those that nobody has). The first candidate gives all it has, then the next:
    the fewer are asked, the fewer frames."""
    left, asked = sorted(set(needed)), {}
    for peer, experts in candidates:
        given = [expert for expert in left if expert in experts]
        if given:
            asked[peer] = given
            left = [expert for expert in left if expert not in experts]
    return asked, left


def place_shares(snapshot: Snapshot, count: int, mixtures: Collection[int]) -> dict[PeerId, PlacedShare]:
    """A share for every joining node whose memory holds no whole layer; nodes of no use are left out.

    One after the other, by peer id. First come layers that somebody leads and of which experts are missing, then the
    first of `mixtures` that nobody else will serve: who can lead it does, with the experts that it has room for, and
    who cannot holds some of its experts until somebody leads it. When nothing is missing, a node holds experts that
    the fewest hold.
    """
    whole = place_joiners(snapshot)
    shares = _Shares(snapshot, count, mixtures, whole.values())
    placed: dict[PeerId, PlacedShare] = {}
    for node in sorted(snapshot.nodes, key=lambda n: n.peer):
        small = node.state is NodeState.JOINING and node.span is None and node.experts is None
        if small and node.layer_capacity == 0:
            found = shares.next(node)
            if found is not None:
                placed[node.peer] = found
                shares.add(found)
    return placed


def is_spare(snapshot: Snapshot, me: NodeProfile, count: int) -> bool:
    """Whether nodes that keep their shares hold all of ours, while experts are missing elsewhere: nodes that did not
    see each other have taken the same, and we choose again. The lowest peer id keeps its share."""
    if me.experts is None or me.span is not None:
        return False
    before = [n for n in snapshot.nodes if n.peer != me.peer and (n.state is NodeState.SERVING or n.peer < me.peer)]
    shares = [n.experts for n in before if n.holds_for_others and n.state in _TAKEN and n.experts]
    missing = missing_experts(me.experts.layers, replace(me.experts, first=0, end=0), shares)
    ours = set(me.experts.experts)
    if any(ours.intersection(range(*gap)) for gaps in missing.values() for gap in gaps):
        return False
    led = [n.experts for n in snapshot.nodes if n.span is not None and n.experts and n.state in _TAKEN]
    every = [n.experts for n in snapshot.nodes if n.holds_for_others and n.state in _TAKEN and n.experts]
    return any(missing_experts(own.layers, own, every) for own in led)


class _Shares:
    """Who leads and holds what, with those placed so far."""

    def __init__(self, snapshot: Snapshot, count: int, mixtures: Collection[int], coming: Iterable[LayerSpan]) -> None:
        taken = [n for n in snapshot.nodes if n.state in _TAKEN]
        sharing = [(n, n.experts) for n in taken if n.experts is not None and n.experts.count == count]
        self._count = count
        self._led = [share for node, share in sharing if node.span is not None]
        self._held = [share for node, share in sharing if node.span is None]
        whole = [n.span for n in taken if n.span is not None and n.experts is None]
        covered = coverage((*whole, *coming), snapshot.num_layers)
        self._gaps = [layer for layer, times in enumerate(covered) if not times and layer in mixtures]

    def add(self, placed: PlacedShare) -> None:
        (self._led if placed.leads else self._held).append(placed.share)

    def next(self, node: NodeProfile) -> PlacedShare | None:
        for own in self._led:
            missing = missing_experts(own.layers, own, self._held)
            if missing:
                return self._hold(node, own.layers, _union(missing))
        for layer in self._gaps:
            if any(layer in own.layers for own in self._led):
                continue
            layers = LayerSpan(layer, layer + 1)
            nothing = ExpertShare(layers, 0, 0, self._count)
            free = missing_experts(layers, nothing, self._held).get(layer, ())
            first = free[0][0] if free else 0
            if node.lead_room >= 0:
                end = min(free[0][1], first + node.lead_room) if free else first
                return PlacedShare(ExpertShare(layers, first, end, self._count), leads=True)
            return self._hold(node, layers, free)
        return self._replica(node)

    def _hold(self, node: NodeProfile, layers: LayerSpan, missing: Sequence[tuple[int, int]]) -> PlacedShare | None:
        """The last of what is missing: a leader that comes later takes the first."""
        room = node.expert_room // len(layers)
        if not missing or room < 1:
            return None
        first, end = missing[-1]
        return PlacedShare(ExpertShare(layers, max(first, end - room), end, self._count), leads=False)

    def _replica(self, node: NodeProfile) -> PlacedShare | None:
        """Of experts that the fewest hold, in the layers where that is the least."""
        best: tuple[int, int, LayerSpan] | None = None
        for own in self._led:
            by_layer = [
                _counts((own, *(share for share in self._held if layer in share.layers)), self._count)
                for layer in own.layers
            ]
            counts = [min(times) for times in zip(*by_layer, strict=True)]
            least = min(counts)
            if best is None or least < best[0]:
                best = least, counts.index(least), own.layers
        room = 0 if best is None else node.expert_room // len(best[2])
        if best is None or room < 1:
            return None
        first = min(best[1], max(0, self._count - room))
        share = ExpertShare(best[2], first, min(self._count, first + room), self._count)
        return PlacedShare(share, leads=False)


def _union(missing: Mapping[int, Sequence[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """Experts that are missing in some layer."""
    experts = {expert for gaps in missing.values() for gap in gaps for expert in range(*gap)}
    return missing_ranges(0 if expert in experts else 1 for expert in range(max(experts, default=-1) + 1))


def _counts(shares: Iterable[ExpertShare], count: int) -> list[int]:
    """How many of `shares` hold each expert."""
    spans = (LayerSpan(share.first, share.end) for share in shares if share.count == count and share.experts)
    return coverage(spans, count)
