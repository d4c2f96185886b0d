"""Which hop a step is stalled at when no result comes although every hop answers pings: from the hops' step counts.

Owns the inference, and for how long nothing has progressed. Pure: the session queries the hops, and the generation loop
decides what becomes of a stalled hop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class HopProgress:
    """What one hop reports of a session. Counts of steps: a step's number plus 1, 0 for none."""

    received: int
    completed: int  # computed, and sent on
    held_ms: float = field(default=0.0, compare=False)  # how long it has been computing the one that is not


def stalled_hops(peers: Sequence[PeerId], progress: Mapping[PeerId, HopProgress], step: int) -> tuple[PeerId, ...]:
    """The hops that may have stalled `step`, the last that was sent along `peers`: the hop that holds it, or both ends
    of the edge that lost it, the far one first; () while a hop has not reported."""
    if any(peer not in progress for peer in peers):
        return ()
    for index, peer in enumerate(peers):
        if progress[peer].completed <= step:
            if progress[peer].received > step:
                return (peer,)
            return (peer, *peers[max(0, index - 1) : index])
    return tuple(peers[-1:])  # its result did not reach us


def hop_holding(peers: Sequence[PeerId], progress: Mapping[PeerId, HopProgress], step: int) -> PeerId | None:
    """The hop that reports `step` as received and not completed; the hops before it need not have reported yet."""
    holding = [peer for peer in peers if (of := progress.get(peer)) is not None and of.received > step >= of.completed]
    return holding[-1] if holding else None


@dataclass(slots=True)
class StallTimer:
    """For how long the progress of all hops has been unchanged."""

    _progress: Mapping[PeerId, HopProgress] = field(default_factory=dict)
    _since: float = 0.0

    def lasted_s(self, progress: Mapping[PeerId, HopProgress], now: float) -> float:
        """`now`: seconds by the caller's clock."""
        if progress != self._progress:
            self._progress, self._since = dict(progress), now
        return now - self._since
