"""How much of a model stays at home: what `--local-layers` says, and the rest, which is all that routing gets to see.

Owns the form of the setting and the arithmetic on layer numbers. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm.errors import NoRoute, UsageError
from swarm.planner.routing.graph import no_route_sentence
from swarm.types import Chain, Hop, LayerSpan, NodeProfile, Snapshot

NONE, AUTO = "none", "auto"
FIRST, LAST = "home-1", "home-2"  # the names of the two hops at home in a chain; no peer id has a hyphen


@dataclass(frozen=True, slots=True)
class LocalLayers:
    """A client holds the embedding, layers `[0, first)`, the last `last` layers of `num_layers`, the norm and the head.

    The layers between, which others compute, are the inner model; within it they are numbered from 0.
    """

    first: int
    last: int
    num_layers: int

    @classmethod
    def parse(cls, text: str, num_layers: int) -> LocalLayers:
        """`"1:1"`. Raises UsageError, also where nothing would be left for others."""
        match = re.fullmatch(r"\s*(\d{1,4}):(\d{1,4})\s*", text)
        if match is None:
            raise UsageError(
                f"'{text}' is no share of the model to hold here; write FIRST:LAST, as in 1:1, auto or none"
            )
        own = cls(int(match[1]), int(match[2]), num_layers)
        if own.first + own.last >= num_layers:
            raise UsageError(
                f"with {text} of {num_layers} layers here no layer is left for the swarm; hold at most {num_layers - 1}"
            )
        return own

    @property
    def hops(self) -> tuple[Hop, Hop]:
        return Hop(FIRST, 0, self.first), Hop(LAST, self.num_layers - self.last, self.num_layers)

    @property
    def inner(self) -> LayerSpan:
        """The layers that others compute."""
        return LayerSpan(self.first, self.num_layers - self.last)

    def around(self, chain: Chain) -> Chain:
        """A chain of the inner model with the hops at home around it, in the model's own numbers."""
        first, last = self.hops
        return replace(chain, hops=(first, *map(self.outer_hop, chain.hops), last))

    def inside(self, chain: Chain) -> Chain:
        """The inverse of `around`, also for a chain that lacks hops."""
        return replace(chain, hops=tuple(self.inner_hop(hop) for hop in chain.hops if not is_home(hop.peer)))

    def outer_hop(self, hop: Hop) -> Hop:
        return Hop(hop.peer, hop.start + self.first, hop.end + self.first)

    def inner_hop(self, hop: Hop) -> Hop:
        return Hop(hop.peer, hop.start - self.first, hop.end - self.first)

    def inner_snapshot(self, snapshot: Snapshot) -> Snapshot:
        """`snapshot` as one of the inner model: of each node the part of its span that is in it."""
        nodes = tuple(map(self._inner_node, snapshot.nodes))
        return replace(snapshot, num_layers=len(self.inner), nodes=nodes)

    def outer_error(self, error: NoRoute) -> NoRoute:
        """An error about the inner model in the model's own numbers."""
        if not error.missing:
            return error
        missing = tuple((start + self.first, end + self.first) for start, end in error.missing)
        return NoRoute(no_route_sentence(missing, self.num_layers), missing)

    def _inner_node(self, node: NodeProfile) -> NodeProfile:
        span, inner = node.span, self.inner
        if span is None:
            return node
        start, end = max(span.start, inner.start), min(span.end, inner.end)
        if start >= end:
            return replace(node, span=None, layer_ms=())
        times = node.layer_ms[start - span.start : end - span.start] if len(node.layer_ms) == len(span) else ()
        return replace(node, span=LayerSpan(start - inner.start, end - inner.start), layer_ms=times)

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def is_home(peer: str) -> bool:
    """Whether a hop of a chain is at the client itself."""
    return peer in (FIRST, LAST)


def foreign(hops: Iterable[Hop]) -> tuple[Hop, ...]:
    """The hops of other machines."""
    return tuple(hop for hop in hops if not is_home(hop.peer))
