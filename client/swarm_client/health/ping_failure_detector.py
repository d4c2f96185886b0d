"""Which of a session's hops still answer: pings that tell a node that is gone from one that is only busy.

Owns how long an answer may take, which it learns. Knows neither steps nor chains; what is done about the silent is not
its business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from swarm.errors import NetworkError
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.types import PeerId

PINGS = 2  # unanswered ones: a peer is silent
MAX_PINGS = 4  # those that we ourselves were late for included
SELF_DELAY_FACTOR = 1.5  # times what a wait was meant to take: then it was us who slept
MAX_BACKOFF = 8  # times the patience, after so many suspicions
RTT_FACTOR = 6.0  # times the slowest answer so far


@dataclass(slots=True)
class PingFailureDetector:
    """One a session. `ping_timeout_s`: how long a peer may leave pings unanswered when nothing else is known.

    A node's event loop answers pings also while it computes. On machines that are overloaded answers take longer, so
    the slowest one counts; and every suspicion doubles the time that the next one takes, so that a session whose nodes
    are well and late is mended for nothing a few times and not for ever.
    """

    pool: ConnectionPool
    ping_timeout_s: float
    _suspicions: int = 0
    _slowest_s: float = 0.0

    async def unresponsive(self, peers: Collection[PeerId]) -> list[PeerId]:
        """Those of `peers` that do not answer, all asked at once."""
        alive = await asyncio.gather(*map(self._answers, peers))
        silent = [peer for peer, answers in zip(peers, alive, strict=True) if not answers]
        self._suspicions += bool(silent)
        return silent

    @property
    def next_timeout_s(self) -> float:
        doubt = min(1 << self._suspicions, MAX_BACKOFF)
        return min(max(self.ping_timeout_s * doubt, RTT_FACTOR * self._slowest_s), self.ping_timeout_s * MAX_BACKOFF)

    async def _answers(self, peer: PeerId) -> bool:
        within_s, missed = self.next_timeout_s / PINGS, 0
        clock = asyncio.get_running_loop().time
        for _ in range(MAX_PINGS):
            asked = clock()
            try:
                async with asyncio.timeout(within_s):
                    rtt_ms = await self.pool.rtt(peer)
            except (NetworkError, TimeoutError):
                missed += clock() - asked < SELF_DELAY_FACTOR * within_s
                if missed == PINGS:
                    return False
            else:
                self._slowest_s = max(self._slowest_s, rtt_ms / 1e3)
                return True
        return False
