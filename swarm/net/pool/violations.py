"""How often each peer has broken the protocol: the one count, of broken frames and of messages that break the rules.

Owns the counts and the limit. What is a violation its callers know: the connection pool, which cuts off whom `refuses`
names, and those who serve what comes over its connections. Used from the event loop only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from swarm.errors import ProtocolError
from swarm.types import PeerId

logger = logging.getLogger(__name__)

MAX_PEERS = 4096  # peer ids cost nothing, so the memory of their violations is bounded


class ProtocolViolations:
    """`limit`: how many of one peer are borne; it is refused from then on, and counted no further."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: OrderedDict[PeerId, int] = OrderedDict()

    @property
    def counts(self) -> dict[PeerId, int]:
        return dict(self._counts)

    def refuses(self, peer: PeerId) -> bool:
        return self._counts.get(peer, 0) >= self._limit

    def record(self, peer: PeerId, error: ProtocolError) -> bool:
        """Count one violation, unless `peer` is refused already. Whether it is refused now."""
        if self.refuses(peer):
            return True
        count = self._counts[peer] = self._counts.pop(peer, 0) + 1
        if len(self._counts) > MAX_PEERS:
            self._counts.popitem(last=False)
        logger.info("protocol violation %d of %s: %s", count, peer, error)
        return self.refuses(peer)
