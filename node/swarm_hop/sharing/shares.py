"""On whose account a session runs: which share of this node belongs to a peer at an address.

One address block is one share while others wait, however many identities come from it; within it clients are equal.
Peers of this machine or of the local network are a share each. Of every block, and of every local address, only the
first few identities that use the node have a place of their own; all that come later share one, since identities
cost nothing: a thousand new ones cannot crowd out the clients that were there before, a few people behind one NAT
each have a place. Peers whose address is unknown, because a relay is between, are one block: what a relay says of where
they come from would be its word. Who has earned it is a share of its own anywhere (`planner.trust.contribution`).

Owns who has which place. Knows neither sessions nor the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm.address_blocks import block_of_ip, is_local
from swarm.planner.scheduling.fair_shares import Share
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class SharePolicy:
    own_places: int = 8
    """Identities of one block with a place of their own: people behind one NAT against a flood of identities."""
    keep_place_s: float = 600.0
    """A place is kept for so long after its last session: clients that come back against places for newcomers."""
    max_blocks: int = 4096
    """Blocks that are remembered; memory."""
    own_block_weight: float = 2.0
    """A client that its nodes' work has brought so far is a share of its own, wherever it comes from: relays and NATs
    with hostile company against the work that such a place costs."""


class SharePlaces:
    """`of(peer, host)` whenever a peer asks for something."""

    def __init__(
        self,
        weight: Callable[[PeerId], float] = lambda peer: 1.0,
        is_owner: Callable[[PeerId], bool] = lambda peer: False,
        policy: SharePolicy = SharePolicy(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weight(peer)`: its part against 1; `is_owner(peer)`: it goes before all others."""
        self._weight = weight
        self._is_owner = is_owner
        self._policy = policy
        self._clock = clock
        self._places: dict[str, dict[PeerId, float]] = {}  # block -> its members and when each was last here

    def of(self, peer: PeerId, remote: str) -> Share:
        """`remote`: the IP address that the peer was seen at, "" if it is unknown."""
        if self._is_owner(peer):
            return Share("owner", peer, first=True)
        block, weight = block_of_ip(remote), self._weight(peer)
        if weight >= self._policy.own_block_weight:
            return Share((block, peer), peer, weight)
        if not self._has_place(block, peer):
            return Share(block)
        return Share((block, peer), peer, weight) if is_local(block) else Share(block, peer, weight)

    def _has_place(self, block: str, peer: PeerId) -> bool:
        now = self._clock()
        places = self._places.setdefault(block, {})
        if peer not in places and len(places) >= self._policy.own_places:
            gone = now - self._policy.keep_place_s
            for other in [other for other, at in places.items() if at < gone]:
                del places[other]
            if len(places) >= self._policy.own_places:
                return False
        places[peer] = now
        if len(self._places) > self._policy.max_blocks:
            self._forget(now)
        return True

    def _forget(self, now: float) -> None:
        """Drop the half of the blocks that was quiet for longest."""
        latest = {block: max(places.values(), default=0.0) for block, places in self._places.items()}
        for block in sorted(latest, key=latest.__getitem__)[: len(latest) // 2]:
            del self._places[block]
