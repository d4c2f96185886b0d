"""Who may send a large frame, before there is a buffer for it: memory is promised to peers that use this process.

A stranger has reason for one large frame, to open a session with a long history; few of those are read at a time, and
one that comes slowly makes way. Owns which are being read. Pure but for the clock that is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from swarm.errors import ConnectionLost
from swarm.net.pool.eviction import LinkUse
from swarm.net.pool.link_uses import LinkUses
from swarm.net.pool.pooled_link import PooledLink


@dataclass(frozen=True, slots=True)
class LargeFramePolicy:
    """Frames over `StreamPolicy.guarded_frame` of peers that have had no session here."""

    max_body: int = 256 << 10  # what strangers have to say has no body, or a short one
    max_at_once: int = 4  # large headers being read, of 2 MB at most: newcomers with long texts against memory
    slow_s: float = 5.0  # after which one makes way


class LargeFrames:
    """`allows` before a frame is read, `done` after it, or after its link has ended."""

    def __init__(self, uses: LinkUses, policy: LargeFramePolicy, clock: Callable[[], float]) -> None:
        self._uses = uses
        self._policy = policy
        self._clock = clock
        self._reading: dict[PooledLink, float] = {}  # since when, oldest first

    def allows(self, link: PooledLink, header: int, body: int) -> bool:
        """See `transport.Connection.guard`."""
        now = self._clock()
        link.checked_at = -math.inf  # its first step may follow its session at once
        if self._uses.of(link, now) is not LinkUse.STRANGER:
            return True
        if body > self._policy.max_body:
            return False
        if len(self._reading) >= self._policy.max_at_once:
            oldest, since = next(iter(self._reading.items()))
            if now - since < self._policy.slow_s:
                return False
            del self._reading[oldest]
            oldest.abort(ConnectionLost(f"{oldest.peer} was slow to send a large frame"))
        self._reading[link] = now
        return True

    def done(self, link: PooledLink) -> None:
        """Idempotent."""
        self._reading.pop(link, None)
