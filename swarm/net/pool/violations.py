"""Protocol violations by peer: one count for malformed frames and for messages that break the rules.

Owns the counts and the limit. What counts as a violation is decided by its callers: the connection pool, which refuses
the peers over the limit, and the services on its connections. Used from the event loop only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from swarm.errors import ProtocolError
from swarm.types import PeerId

logger = logging.getLogger(__name__)


class ProtocolViolations:
    """`limit`: a peer with so many is refused, and counted no further.

    `max_peers`: bounds the memory, as peer ids are free to make; the count updated least recently is evicted.
    """

    def __init__(self, limit: int, max_peers: int = 4096) -> None:
        self._limit = limit
        self._max_peers = max_peers
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
        if len(self._counts) > self._max_peers:
            self._counts.popitem(last=False)
        logger.info("protocol violation %d of %s: %s", count, peer, error)
        return self.refuses(peer)
