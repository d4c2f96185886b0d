"""On whose accounts this node works, and what it has given: its owner first, its owner's helpers, everybody's receipts.

Owns how these are put together from the owner's settings. Who is served when is decided by `planner.scheduling`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from swarm.config import NodeConfig, peer_memory_dir
from swarm.net.security.identity import verify
from swarm.receipts import WorkReceipt, check_receipt
from swarm.records import MAX_OWNERS, owner_tag
from swarm.types import PeerId, Snapshot
from swarm_hop.serving.session import HopSession
from swarm_hop.sharing.contributors import Contributors
from swarm_hop.sharing.shares import SharePlaces
from swarm_node.owner.contributions import ContributionLedger, ledger_file, owner_peer


class Accounts:
    """Of the node `peer`. `owner_tags`: for its record."""

    def __init__(
        self,
        config: NodeConfig,
        peer: PeerId,
        snapshot: Callable[[], Awaitable[Snapshot]],
        wall_clock: Callable[[], float],
    ) -> None:
        """Raises IdentityError, UsageError for an owner that is none."""
        owners = {owner_peer(entry): None for entry in config.owner}
        self.ledger = ContributionLedger(ledger_file(config, peer))
        self.contributors = Contributors(peer_memory_dir(), snapshot, wall_clock)
        self.places = SharePlaces(weight=self.contributors.weight, is_owner=owners.__contains__)
        self.owner_tags = tuple(owner_tag(peer, client) for client in owners)[:MAX_OWNERS]
        self._peer = peer
        self._wall_clock = wall_clock

    def on_receipt(self, session: HopSession, message: WorkReceipt) -> None:
        """Raises ProtocolError."""
        client = session.client.peer
        receipt = check_receipt(message, self._peer, client, session.committed, len(session.span), verify)
        self.ledger.acknowledge(client, receipt, self._wall_clock())

    async def run(self, update: Callable[[], None]) -> None:
        """`update()` brings the ledger's counts up to date."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ledger.run(update), name="ledger")
            group.create_task(self.contributors.run(), name="contributors")
