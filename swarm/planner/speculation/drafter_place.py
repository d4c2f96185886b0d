"""Where a drafter that reads hidden states runs: on the client, to which every hop sends its own, or at the tail, to
which they are carried along the chain.

Owns what either place adds to a round, and the sentence that says so; and what the tails of a swarm offer. The rounds
are the same in both places: a tree is drafted after the result and before the next step. What differs is who computes
it, over which links the states go, and that a client without a model needs none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm.planner.speculation.policy import PLACE, PlacePolicy
from swarm.types import Hop, OfferedDrafter, Snapshot

_ID_BYTES = 5  # of a token id, which goes along with each row


class Place(StrEnum):
    CLIENT = "client"
    TAIL = "tail"


@dataclass(frozen=True, slots=True)
class TailOffer:
    """The drafter that most of a swarm's last nodes hold: `tails` of `of`. `hops`: a chain, about as it will be."""

    drafter: OfferedDrafter
    tails: int
    of: int
    hops: tuple[Hop, ...] = ()

    def taps_of_hops(self) -> tuple[int, ...]:
        """How many of its taps each hop has."""
        ends = [hop.end for hop in self.hops]
        return tuple(
            sum(hop.start <= tap < hop.end + (hop.end == ends[-1]) for tap in self.drafter.taps) for hop in self.hops
        )

    def __str__(self) -> str:
        some = "" if self.tails == self.of else f", which {self.tails} of {self.of} last nodes hold"
        return f"the {_NAMES.get(self.drafter.kind, self.drafter.kind)} drafter {self.drafter.name} at the tail{some}"


_NAMES = {"eagle": "EAGLE-3", "dflash": "DFlash", "mtp": "MTP"}


@dataclass(frozen=True, slots=True)
class DrafterPlacement:
    """`place`: None where nobody can draft. `ms`, `bytes`: what a round takes more there."""

    place: Place | None
    reason: str
    client_ms: float | None = None
    tail_ms: float | None = None
    client_bytes: int = 0
    tail_bytes: int = 0


def find_tail_offer(snapshot: Snapshot, weight_hash: str) -> TailOffer | None:
    """What most of the last nodes with these weights hold, if any holds something."""
    tails = [
        node
        for node in snapshot.serving()
        if node.span is not None and node.span.end == snapshot.num_layers and node.weight_hash == weight_hash
    ]
    offers = {node.drafter.fingerprint: node.drafter for node in reversed(tails) if node.drafter is not None}
    counts = Counter(node.drafter.fingerprint for node in tails if node.drafter is not None)
    if not counts:
        return None
    most = min(counts, key=lambda fingerprint: (-counts[fingerprint], fingerprint))
    return TailOffer(offers[most], counts[most], len(tails), _likely_hops(snapshot))


def choose_place(
    client_ms: float | None,
    tail_ms: float | None,
    taps_of_hops: Sequence[int],
    row_bytes: int,
    policy: PlacePolicy = PLACE,
) -> DrafterPlacement:
    """`client_ms`, `tail_ms`: what a tree takes there, None where there is no such drafter. `taps_of_hops`: how many
    each hop of the chain has; `row_bytes`: of one tap's row.

    To the client all hops send at once, beside the step, so the most that one of them sends counts; along the chain
    each link carries what came so far, one link after the other.
    """
    rows, links = policy.step_rows, max(0, len(taps_of_hops) - 1)
    sent = [taps * rows * row_bytes for taps in taps_of_hops]
    carried = [taps * rows * row_bytes for taps in itertools.accumulate(taps_of_hops)][:-1]
    ids = links * rows * _ID_BYTES
    client_bytes, tail_bytes = sum(sent), sum(carried) + ids
    here = None if client_ms is None else client_ms + max(sent, default=0) / policy.link_bytes_per_ms
    there = None if tail_ms is None else tail_ms + tail_bytes / policy.link_bytes_per_ms
    if here is None or there is None:
        place = Place.TAIL if there is not None else Place.CLIENT if here is not None else None
        reason = {
            Place.TAIL: "the client has no such drafter, and the tail offers one",
            Place.CLIENT: "no last node offers one",
            None: "neither the client nor a last node has one",
        }[place]
        return DrafterPlacement(place, reason, here, there, client_bytes, tail_bytes)
    place = Place.TAIL if (there, tail_bytes) < (here, client_bytes) else Place.CLIENT
    at_tail = f"{there:.1f} ms at the tail (a tree {tail_ms:.1f} ms, {tail_bytes / 1e3:.1f} kB along {links} links)"
    at_client = f"{here:.1f} ms here (a tree {client_ms:.1f} ms, {client_bytes / 1e3:.1f} kB from the nodes)"
    first, second = (at_tail, at_client) if place is Place.TAIL else (at_client, at_tail)
    reason = f"it adds {first} to a round of {rows} rows, and {second}"
    return DrafterPlacement(place, reason, here, there, client_bytes, tail_bytes)


def _likely_hops(snapshot: Snapshot) -> tuple[Hop, ...]:
    """A chain of few hops; () where layers lack."""
    hops: list[Hop] = []
    at = 0
    while at < snapshot.num_layers:
        spans = [(node.span.end, node.peer) for node in snapshot.serving() if node.span and node.span.start <= at]
        end, peer = max(spans, default=(at, ""))
        if end <= at:
            return ()
        hops.append(Hop(peer, at, end))
        at = end
    return tuple(hops)
