"""How much one untrusted peer may take: sessions and unread replies; how often its share may open sessions.

Owns the counters per peer and share, and the estimate of when there is room again. Uses neither sockets nor sessions;
connections and protocol violations are counted by the pool.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from swarm.config import Limits
from swarm.errors import NodeBusy, ProtocolError
from swarm.ewma import Ewma
from swarm.planner.scheduling.fair_shares import Share
from swarm.token_bucket import KeyedBuckets
from swarm.types import PeerId
from swarm_hop.serving.policy import SessionPolicy


class Quotas:
    """One per node; used from the event loop only."""

    def __init__(
        self, limits: Limits, policy: SessionPolicy = SessionPolicy(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._ended_at: float | None = None
        self._end_interval_s = Ewma(policy.session_end_decay, 1.0)
        self._opens = KeyedBuckets(policy.opens_per_s, policy.opens_burst)
        self._sessions: Counter[PeerId] = Counter()
        self._replies: Counter[PeerId] = Counter()

    @property
    def sessions(self) -> int:
        return self._sessions.total()

    def take_open(self, share: Share) -> None:
        """Raises NodeBusy above the rate at which a share may open sessions, and ProtocolError far above it."""
        if share.first:
            return
        wait_s = self._opens.spend((share.block, share.member), 1.0, self._clock())
        if wait_s > self._policy.opens_debt_s:
            raise ProtocolError(f"sessions are opened far above {self._policy.opens_per_s:g} a second")
        if wait_s > 0.0:
            sentence = f"more than {self._policy.opens_per_s:g} sessions a second are opened from where you are"
            raise NodeBusy(sentence, retry_after_s=min(wait_s, self._policy.max_retry_after_s))

    def take_wrong_open(self, share: Share) -> None:
        """One that could not be served costs more: a client reads our record before it opens a session."""
        if not share.first:
            self._opens.spend((share.block, share.member), self._policy.wrong_open_cost, self._clock())

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
            self._end_interval_s.update(now - self._ended_at)
        self._ended_at = now
        _decrement(self._sessions, peer)

    @property
    def retry_after_s(self) -> float:
        """When a session is likely to have ended: the mean interval between their ends."""
        policy = self._policy
        return min(policy.max_retry_after_s, max(policy.min_retry_after_s, self._end_interval_s.value))

    def take_reply(self, peer: PeerId) -> bool:
        """Whether one more reply may wait until `peer` reads it."""
        if self._replies[peer] >= self._policy.max_unread_replies:
            return False
        self._replies[peer] += 1
        return True

    def give_reply(self, peer: PeerId) -> None:
        _decrement(self._replies, peer)


def _decrement(counter: Counter[PeerId], peer: PeerId) -> None:
    counter[peer] -= 1
    if counter[peer] <= 0:
        del counter[peer]
