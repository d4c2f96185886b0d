"""A swarm as people look at it: nodes, coverage of each layer, answers being written; and what changed since.

Owns the JSON of the gateway's `/swarm` and of `swarm-node top`. Records are strangers' text: everything shown is
bounded and without control characters, and no prompt or answer is ever in it. Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import msgspec

from swarm.types import Chain, LayerSpan, NodeProfile, PeerId, Snapshot

MAX_TEXT = 64  # characters of a name, region, version or format
MAX_REASON = 200  # characters of why a chain was repaired

SMALL_SWARM = 64  # nodes; in a larger one only the nearest links of each node are shown
MAX_LINKS_SHOWN = 6  # of a node of a larger swarm: with all 24, 1,000 nodes are 1.7 MB

NOTICED_SHARE = 0.1  # relative change of a layer's or link's time that readers are told of
NOTICED_KV_SHARE = 0.02  # of a node's KV capacity
NOTICED_LINK_MS = 1.0

Range = tuple[int, int]
"""Layers `[start, end)`."""


class NodeOverview(msgspec.Struct, frozen=True):
    """A node by its record. `layer_ms`: mean τ of its layers; `age_s`: of the record; `links`: one-way ms, to nodes of
    this overview only, in a large swarm to the nearest."""

    peer: PeerId
    name: str
    state: str
    start: int | None
    end: int | None
    layer_ms: float
    kv_capacity_tokens: int
    kv_free_tokens: int
    sessions: int
    region: str
    version: str
    dtype: str
    pinned: bool
    age_s: float
    links: dict[PeerId, float]

    @property
    def span(self) -> Range | None:
        return (self.start, self.end) if self.start is not None and self.end is not None else None


class HopOverview(msgspec.Struct, frozen=True):
    peer: PeerId
    start: int
    end: int


class AnswerOverview(msgspec.Struct, frozen=True):
    """An answer being written. `state`: "waiting" for a chain or its first token, or "writing"; `tokens` of the answer
    so far; `repairs`: a sentence for each, oldest first."""

    id: str
    model: str
    chain: tuple[HopOverview, ...]
    tokens: int
    tokens_per_second: float
    strategy: str
    state: str
    repairs: tuple[str, ...]


class MoveOverview(msgspec.Struct, frozen=True, rename={"before": "from", "after": "to"}):
    """A node that has other layers now, or that chose its first ones or gave its last ones up."""

    peer: PeerId
    before: Range | None
    after: Range | None


class OverviewChange(msgspec.Struct, frozen=True):
    """What makes one overview the next. `updated`: nodes with figures that changed noticeably, whole."""

    observed_at: float
    joined: tuple[NodeOverview, ...]
    left: tuple[PeerId, ...]
    moved: tuple[MoveOverview, ...]
    updated: tuple[NodeOverview, ...]
    coverage: tuple[int, ...]
    missing: tuple[Range, ...]
    answers: tuple[AnswerOverview, ...]


class SwarmOverview(msgspec.Struct, frozen=True):
    """`coverage`: serving replicas of each layer; `missing`: layers that none serves. Nodes are sorted by peer id."""

    model: str
    num_layers: int
    observed_at: float  # seconds since the epoch
    coverage: tuple[int, ...]
    missing: tuple[Range, ...]
    nodes: tuple[NodeOverview, ...]
    answers: tuple[AnswerOverview, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot, now: float, answers: Sequence[AnswerOverview] = ()) -> SwarmOverview:
        """`now`: seconds since the epoch, for the ages of the records."""
        known = {node.peer for node in snapshot.nodes}
        return cls(
            snapshot.model,
            snapshot.num_layers,
            round(snapshot.observed_at, 3),
            tuple(snapshot.coverage()),
            snapshot.missing(),
            tuple(_node(node, now, known) for node in snapshot.nodes),
            tuple(answers),
        )

    def apply(self, change: OverviewChange) -> SwarmOverview:
        """What a reader of this overview knows after `change`."""
        nodes = {node.peer: node for node in self.nodes}
        for peer in change.left:
            nodes.pop(peer, None)
        for move in change.moved:
            start, end = move.after or (None, None)
            nodes[move.peer] = msgspec.structs.replace(nodes[move.peer], start=start, end=end)
        nodes.update((node.peer, node) for node in (*change.joined, *change.updated))
        return SwarmOverview(
            self.model,
            len(change.coverage),
            change.observed_at,
            change.coverage,
            change.missing,
            tuple(nodes[peer] for peer in sorted(nodes)),
            change.answers,
        )


def changes(before: SwarmOverview, after: SwarmOverview) -> OverviewChange:
    """What a reader who knows `before` must be told to know `after`, but for figures that hardly differ.

    Compare with what readers were told (`SwarmOverview.apply`), so that slow drift is told as well.
    """
    old = {node.peer: node for node in before.nodes}
    new = {node.peer for node in after.nodes}
    joined, moved, updated = [], [], []
    for node in after.nodes:
        known = old.get(node.peer)
        if known is None:
            joined.append(node)
            continue
        if known.span != node.span:
            moved.append(MoveOverview(node.peer, known.span, node.span))
        if _noticeable(known, node):
            updated.append(node)
    return OverviewChange(
        after.observed_at,
        tuple(joined),
        tuple(peer for peer in old if peer not in new),
        tuple(moved),
        tuple(updated),
        after.coverage,
        after.missing,
        after.answers,
    )


def chain_overview(chain: Chain | None) -> tuple[HopOverview, ...]:
    return tuple(HopOverview(hop.peer, hop.start, hop.end) for hop in chain.hops) if chain is not None else ()


def plain_text(text: str, limit: int = MAX_TEXT) -> str:
    """`text` without control and format characters (terminal escapes, text direction), `limit` characters at most."""
    text = text[:limit]
    return text if text.isprintable() else "".join(c for c in text if c.isprintable())


def _node(node: NodeProfile, now: float, known: set[PeerId]) -> NodeOverview:
    span: LayerSpan | None = node.span
    return NodeOverview(
        peer=node.peer,
        name=plain_text(node.name),
        state=str(node.state),
        start=span.start if span is not None else None,
        end=span.end if span is not None else None,
        layer_ms=round(sum(node.layer_ms) / len(node.layer_ms), 4) if node.layer_ms else 0.0,
        kv_capacity_tokens=node.kv_capacity_tokens,
        kv_free_tokens=node.kv_free_tokens,
        sessions=node.sessions,
        region=plain_text(node.region),
        version=plain_text(node.version),
        dtype=plain_text(node.dtype),
        pinned=node.pinned,
        age_s=max(0.0, round(now - node.published_at, 1)),
        links=_links(node, known),
    )


def _links(node: NodeProfile, known: set[PeerId]) -> dict[PeerId, float]:
    links = {peer: round(ms, 2) for peer, ms in node.link_ms.items() if peer in known}
    if len(known) <= SMALL_SWARM or len(links) <= MAX_LINKS_SHOWN:
        return links
    nearest = sorted(links.items(), key=itemgetter(1, 0))
    return dict(nearest[:MAX_LINKS_SHOWN])


def _noticeable(a: NodeOverview, b: NodeOverview) -> bool:
    same = (a.state, a.sessions, a.name, a.region, a.version, a.dtype, a.pinned, a.kv_capacity_tokens) == (
        (b.state, b.sessions, b.name, b.region, b.version, b.dtype, b.pinned, b.kv_capacity_tokens)
    )
    if not same or _differs(a.layer_ms, b.layer_ms, 0.0):
        return True
    if abs(a.kv_free_tokens - b.kv_free_tokens) > NOTICED_KV_SHARE * a.kv_capacity_tokens:
        return True
    if (a.kv_free_tokens == 0) != (b.kv_free_tokens == 0) or a.links.keys() != b.links.keys():
        return True
    return a.links != b.links and any(_differs(ms, b.links[peer], NOTICED_LINK_MS) for peer, ms in a.links.items())


def _differs(a: float, b: float, least: float) -> bool:
    return abs(a - b) > max(least, NOTICED_SHARE * min(a, b))
