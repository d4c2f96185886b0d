"""Where a step is when no result comes although every hop answers pings: told by what each hop has had and passed on.

Owns the inference, and how long nothing may have moved. Pure: asking the hops is `chain_session`'s, what becomes of the
suspects is the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class HopProgress:
    """What one hop says of a session. Counts of steps: a step's number plus 1, 0 for none."""

    received: int
    completed: int  # computed, and sent on
    held_ms: float = field(default=0.0, compare=False)  # how long it has been computing the one that is not


def stalled_hops(peers: Sequence[PeerId], places: Mapping[PeerId, HopProgress], step: int) -> tuple[PeerId, ...]:
    """Who keeps `step`, the last that was sent along `peers`: the hop that has it, or both ends of the edge that
    swallowed it, the far one first; () while a hop has not said."""
    if any(peer not in places for peer in peers):
        return ()
    for index, peer in enumerate(peers):
        if places[peer].completed <= step:
            if places[peer].received > step:
                return (peer,)
            return (peer, *peers[max(0, index - 1) : index])
    return tuple(peers[-1:])  # its result did not reach us


def hop_holding(peers: Sequence[PeerId], places: Mapping[PeerId, HopProgress], step: int) -> PeerId | None:
    """The hop that says that it has `step` and is not done with it; the hops before may not have said so yet."""
    having = [
        peer for peer in peers if (place := places.get(peer)) is not None and place.received > step >= place.completed
    ]
    return having[-1] if having else None


@dataclass(slots=True)
class StallTimer:
    """How long the places of all hops have been what they are."""

    _places: Mapping[PeerId, HopProgress] = field(default_factory=dict)
    _since: float = 0.0

    def lasted_s(self, places: Mapping[PeerId, HopProgress], now: float) -> float:
        """`now`: seconds by the caller's clock."""
        if places != self._places:
            self._places, self._since = dict(places), now
        return now - self._since
