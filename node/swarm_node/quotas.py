"""How much one stranger may take: sessions, unread answers, and patience for messages that break the rules.

Owns the counters of what each peer holds. Knows neither sockets nor sessions; connections are counted by the pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from swarm.config import Limits
from swarm.errors import NodeBusy
from swarm.types import PeerId

REMEMBERED_OFFENDERS = 4096  # identities are free, so the memory of offences is bounded
MAX_UNREAD_ANSWERS = 32


class Quotas:
    """One per node; used from the event loop only."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sessions: Counter[PeerId] = Counter()
        self._answers: Counter[PeerId] = Counter()
        self._offences: OrderedDict[PeerId, int] = OrderedDict()

    @property
    def sessions(self) -> int:
        return self._sessions.total()

    def take_session(self, peer: PeerId) -> None:
        """Raises NodeBusy when the node, or `peer` on it, holds its most sessions."""
        if self.sessions >= self._limits.max_sessions:
            raise NodeBusy(f"this node serves {self._limits.max_sessions} sessions, its most", peer)
        if self._sessions[peer] >= self._limits.max_sessions_per_peer:
            raise NodeBusy(f"you hold {self._limits.max_sessions_per_peer} sessions here, the most for one peer", peer)
        self._sessions[peer] += 1

    def give_session(self, peer: PeerId) -> None:
        _decrement(self._sessions, peer)

    def take_answer(self, peer: PeerId) -> bool:
        """Whether one more answer may wait until `peer` reads it."""
        if self._answers[peer] >= MAX_UNREAD_ANSWERS:
            return False
        self._answers[peer] += 1
        return True

    def give_answer(self, peer: PeerId) -> None:
        _decrement(self._answers, peer)

    def offence(self, peer: PeerId) -> bool:
        """Count one broken rule of `peer`. True when our patience with it is over."""
        count = self._offences[peer] = self._offences.pop(peer, 0) + 1
        if len(self._offences) > REMEMBERED_OFFENDERS:
            self._offences.popitem(last=False)
        return count >= self._limits.max_protocol_errors


def _decrement(counter: Counter[PeerId], peer: PeerId) -> None:
    counter[peer] -= 1
    if counter[peer] <= 0:
        del counter[peer]
