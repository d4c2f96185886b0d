"""The other nodes as this one has met them: since when it sees their records, and whether they answer.

Owns these facts, bounded by the nodes in sight. What is built on whom is decided by `swarm.planner.trust.doubts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swarm.planner.trust.doubts import Acquaintance, DoubtPolicy, Doubts, doubts
from swarm.types import PeerId


class Acquaintances:
    """All times are seconds by the caller's clock."""

    def __init__(self, own: PeerId, policy: DoubtPolicy = DoubtPolicy()) -> None:
        self._own = own
        self._policy = policy
        self._known: dict[PeerId, Acquaintance] = {}
        self._condemned: set[PeerId] = set()

    def saw(self, peers: Iterable[PeerId], now: float) -> None:
        """Their records are in the directory now; all others are forgotten."""
        self._known = {peer: self._known.get(peer) or self._met(peer, now) for peer in peers if peer != self._own}

    def answered(self, peer: PeerId) -> None:
        if peer in self._known:
            self._known[peer] = replace(self._known[peer], answered=True, missed=0)

    def missed(self, peer: PeerId) -> None:
        """It did not answer a ping."""
        if peer in self._known:
            self._known[peer] = replace(self._known[peer], missed=self._known[peer].missed + 1)

    def condemn(self, peer: PeerId) -> None:
        """An audit of it failed, and we have checked the evidence."""
        if len(self._condemned) < 4096:
            self._condemned.add(peer)
        if peer in self._known:
            self._known[peer] = replace(self._known[peer], condemned=True)

    def strangers(self) -> list[PeerId]:
        """Those that have not answered yet, to be pinged; the least asked first."""
        waiting = [peer for peer, one in self._known.items() if not one.answered]
        return sorted(waiting, key=lambda peer: (self._known[peer].missed, peer))

    def doubts(self, now: float) -> Doubts:
        return doubts(self._own, self._known, now, self._policy)

    def _met(self, peer: PeerId, now: float) -> Acquaintance:
        return Acquaintance(now, condemned=peer in self._condemned)
