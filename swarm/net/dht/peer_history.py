"""Since when each peer has been around without a break, as one DHT node has seen it.

Owns that memory and its bounds. A peer counts as seen when an entry that it signed was checked. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.net.dht.policy import HistoryPolicy
from swarm.types import PeerId


@dataclass(slots=True)
class _Presence:
    first_seen: float
    last_seen: float


class PeerHistory:
    """All times are of one clock of the caller's."""

    def __init__(self, policy: HistoryPolicy = HistoryPolicy()) -> None:
        self._policy = policy
        self._presence: dict[PeerId, _Presence] = {}

    def __len__(self) -> int:
        return len(self._presence)

    def saw(self, peer: PeerId, now: float) -> None:
        presence = self._presence.get(peer)
        if presence is None or now - presence.last_seen > self._policy.absence_s:
            self._presence[peer] = _Presence(now, now)
            if len(self._presence) > self._policy.max_peers * 9 // 8:
                self._forget(now)
        else:
            presence.last_seen = now

    def first_seen(self, peer: PeerId, now: float) -> float:
        """`now` for one who was not seen lately."""
        presence = self._presence.get(peer)
        if presence is None or now - presence.last_seen > self._policy.absence_s:
            return now
        return presence.first_seen

    def _forget(self, now: float) -> None:
        """First those who are gone, then the newest: whoever comes in bulk pushes out itself."""
        oldest = sorted(self._presence.items(), key=lambda item: item[1].first_seen)
        present = [item for item in oldest if now - item[1].last_seen <= self._policy.absence_s]
        self._presence = dict(present[: self._policy.max_peers])
