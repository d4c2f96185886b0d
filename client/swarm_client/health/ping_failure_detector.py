"""Failure detector: pings tell a hop that is gone from one that is only busy.

Owns how long a reply to a ping may take, which it learns from the round-trip times. Knows neither steps nor chains nor
sockets; what is done about an unresponsive hop is the session's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from swarm.errors import NetworkError
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class PingPolicy:
    """How soon a hop that does not answer counts as failed: sooner saves waiting, later saves needless repairs."""

    pings: int = 2  # unanswered pings after which a hop is unresponsive
    max_pings: int = 4  # including those that do not count because this process was itself late
    self_delay_factor: float = 1.5  # a wait that took so many times its timeout was delayed by this process
    rtt_factor: float = 6.0  # times the slowest round trip so far
    max_backoff: int = 8  # times the ping timeout, at most, after repeated suspicions


@dataclass(slots=True)
class PingFailureDetector:
    """One a session. `rtt`: pings a peer and returns the round-trip time in ms, or raises NetworkError.
    `ping_timeout_s`: how long a peer may leave pings unanswered before anything was measured.

    A node's event loop answers pings also while it computes. On overloaded machines replies take longer, so the slowest
    round trip counts; and every suspicion doubles the next timeout (exponential backoff), so that a session whose nodes
    are alive but late is repaired needlessly a few times and not for ever.
    """

    rtt: Callable[[PeerId], Awaitable[float]]
    ping_timeout_s: float
    policy: PingPolicy = PingPolicy()
    _suspicions: int = 0
    _slowest_s: float = 0.0

    async def unresponsive(self, peers: Collection[PeerId]) -> list[PeerId]:
        """Those of `peers` that do not answer; all are pinged at once."""
        alive = await asyncio.gather(*map(self._answers, peers))
        silent = [peer for peer, answers in zip(peers, alive, strict=True) if not answers]
        self._suspicions += bool(silent)
        return silent

    @property
    def next_timeout_s(self) -> float:
        most = self.policy.max_backoff
        backoff = min(1 << self._suspicions, most)
        from_rtt_s = self.policy.rtt_factor * self._slowest_s
        return min(max(self.ping_timeout_s * backoff, from_rtt_s), self.ping_timeout_s * most)

    async def _answers(self, peer: PeerId) -> bool:
        policy = self.policy
        timeout_s, missed = self.next_timeout_s / policy.pings, 0
        clock = asyncio.get_running_loop().time
        for _ in range(policy.max_pings):
            sent_at = clock()
            try:
                async with asyncio.timeout(timeout_s):
                    rtt_ms = await self.rtt(peer)
            except (NetworkError, TimeoutError):
                missed += clock() - sent_at < policy.self_delay_factor * timeout_s
                if missed == policy.pings:
                    return False
            else:
                self._slowest_s = max(self._slowest_s, rtt_ms / 1e3)
                return True
        return False
