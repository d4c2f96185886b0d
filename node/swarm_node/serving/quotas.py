"""How much one stranger may take: sessions and unread answers.

Owns the counters of what each peer holds, and the guess of when there is room again. Knows neither sockets nor
sessions; connections and broken rules are counted by the pool.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from swarm.config import Limits
from swarm.errors import NodeBusy
from swarm.ewma import Ewma
from swarm.types import PeerId

MAX_UNREAD_REPLIES = 32
RETRY_AFTER_S = (0.5, 30.0)  # the least and the most that a full node sends a client away for
EWMA_DECAY = 0.8  # weight of what was seen before, in how often a session ends


class Quotas:
    """One per node; used from the event loop only."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._ended_at: float | None = None
        self._end_every_s = Ewma(EWMA_DECAY, 1.0)
        self._sessions: Counter[PeerId] = Counter()
        self._answers: Counter[PeerId] = Counter()

    @property
    def sessions(self) -> int:
        return self._sessions.total()

    def take_session(self, peer: PeerId) -> None:
        """Raises NodeBusy when the node, or `peer` on it, holds its most sessions."""
        if self.sessions >= self._limits.max_sessions:
            sentence = f"this node serves {self._limits.max_sessions} sessions, its most"
            raise NodeBusy(sentence, peer, self.retry_after_s)
        if self._sessions[peer] >= self._limits.max_sessions_per_peer:
            sentence = f"you hold {self._limits.max_sessions_per_peer} sessions here, the most for one peer"
            raise NodeBusy(sentence, peer, self.retry_after_s)
        self._sessions[peer] += 1

    def give_session(self, peer: PeerId) -> None:
        now = self._clock()
        if self._ended_at is not None:
            self._end_every_s.update(now - self._ended_at)
        self._ended_at = now
        _decrement(self._sessions, peer)

    @property
    def retry_after_s(self) -> float:
        """When a session is likely to have ended: they end so often."""
        least, most = RETRY_AFTER_S
        return min(most, max(least, self._end_every_s.value))

    def take_reply(self, peer: PeerId) -> bool:
        """Whether one more answer may wait until `peer` reads it."""
        if self._answers[peer] >= MAX_UNREAD_REPLIES:
            return False
        self._answers[peer] += 1
        return True

    def give_reply(self, peer: PeerId) -> None:
        _decrement(self._answers, peer)


def _decrement(counter: Counter[PeerId], peer: PeerId) -> None:
    counter[peer] -= 1
    if counter[peer] <= 0:
        del counter[peer]
