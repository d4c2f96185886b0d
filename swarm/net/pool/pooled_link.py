"""A live link and what its pool knows of it."""

from __future__ import annotations

import asyncio
import math

from swarm.address_blocks import block_of_ip
from swarm.net.base.transport import Connection
from swarm.net.pool.eviction import LinkUse
from swarm.net.pool.migratable_link import MigratableLink


class PooledLink(MigratableLink):
    """Made and changed by the pool alone."""

    def __init__(self, connection: Connection, outgoing: bool) -> None:
        super().__init__(connection, outgoing)
        self.pings: dict[int, asyncio.Future[float]] = {}  # nonce -> loop time of its pong
        self.pending_pongs = 0  # being sent
        self.first_frame = True  # none received yet
        self.active = True  # a frame was received since the last keepalive tick
        self.missed_ticks = 0  # in a row without a frame
        self.migrated_to: PooledLink | None = None  # the link whose new path this connection is; it reads it now
        self.block = block_of_ip(connection.remote)
        self.since = asyncio.get_running_loop().time()  # opened, or seen in use
        self.use = LinkUse.STRANGER
        self.checked_at = -math.inf  # when `use` was found
