"""From which address block each connected peer was seen, for a DHT node.

Owns a cache of what the libp2p host knows of its connections. A peer's own claims are never asked: whoever could choose
its block could take another's share.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from swarm.address_blocks import UNKNOWN_BLOCK, block_of_ip
from swarm.errors import NetworkError
from swarm.types import PeerId

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
MAX_PEERS = 8192


class PeerBlocks:
    """`connected`: the IP addresses of the peers that the host is connected to now, "" for a relayed one."""

    def __init__(self, connected: Callable[[], Awaitable[Mapping[PeerId, str]]], clock: Callable[[], float]) -> None:
        self._connected = connected
        self._clock = clock
        self._blocks: dict[PeerId, str] = {}
        self._refreshed_at = float("-inf")

    def of(self, peer: PeerId) -> str:
        return self._blocks.get(peer, UNKNOWN_BLOCK)

    async def refresh_for(self, peer: PeerId) -> None:
        """Ask the host about its connections, unless `peer` is known or that was done just now."""
        now = self._clock()
        if peer in self._blocks or now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        try:
            addresses = await self._connected()
        except NetworkError as error:
            logger.debug("cannot see where the peers are: %s", error)
            return
        if len(self._blocks) > MAX_PEERS:
            self._blocks = {}
        self._blocks.update((peer, block_of_ip(ip)) for peer, ip in addresses.items())
