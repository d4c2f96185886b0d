"""The maintenance loop of a serving node: read the swarm, rebalance, re-bootstrap vanished peers, check the clock.

Owns the tick, the peers seen so far, and when the clock is checked. When to move is decided by
`swarm.planner.rebalancing.rebalancer` and done by `span_manager`: every node computes the same target from the same
snapshot and moves only in the first wave, so no consensus is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarm.errors import ClockSkew, NetworkError, OutOfMemory
from swarm.planner.rebalancing.rebalancer import RebalanceDecision, Rebalancer
from swarm.planner.trust.doubts import Doubts
from swarm.types import PeerId, Snapshot
from swarm_node.membership.acquaintances import Acquaintances
from swarm_node.membership.policy import MembershipPolicy
from swarm_node.network.connection import NodeNetwork

logger = logging.getLogger(__name__)


class MaintenanceLoop:
    """`await run()` in a task.

    `snapshot()`: the nodes that could be in one chain with us, ourselves included. `is_serving()`: whether we serve.
    `move` carries out a decision to move. `acquaintances`: what we have seen of the others ourselves.
    """

    def __init__(
        self,
        network: NodeNetwork,
        rebalancer: Rebalancer,
        *,
        snapshot: Callable[[], Awaitable[Snapshot]],
        is_serving: Callable[[], bool],
        move: Callable[[RebalanceDecision], Awaitable[None]],
        acquaintances: Acquaintances | None = None,
        policy: MembershipPolicy = MembershipPolicy(),
    ) -> None:
        self._acquaintances = acquaintances or Acquaintances(network.transport.peer)
        self._network = network
        self._rebalancer = rebalancer
        self._snapshot = snapshot
        self._is_serving = is_serving
        self._move = move
        self._policy = policy
        self._known: dict[PeerId, tuple[str, float]] = {}  # address, when last seen
        self._next_rebootstrap = self._next_clock = 0.0

    async def run(self) -> None:
        """Raises ClockSkew; other network errors are logged and retried."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._policy.tick_s)
            try:
                snapshot = await self._snapshot()
                self._acquaintances.saw((node.peer for node in snapshot.nodes), loop.time())
                doubts = self._acquaintances.doubts(loop.time())
                await self._rebootstrap_vanished(doubts.believed(snapshot), loop.time())
            except NetworkError as error:
                logger.info("cannot read the directory: %s", error)
                continue
            await self._check_clock(loop.time())
            if self._is_serving():
                await self._rebalance(snapshot, doubts, loop.time())

    async def _rebalance(self, snapshot: Snapshot, doubts: Doubts, now: float) -> None:
        decision = self._rebalancer.observe(snapshot, now, doubts)
        if decision.move is None:
            logger.debug("keeps its layers: %s", decision.reason)
            return
        self._rebalancer.moved(now)
        try:
            await self._move(decision)
        except OutOfMemory as error:
            logger.warning("keeps its layers: %s", error)

    async def _check_clock(self, now: float) -> None:
        if now < self._next_clock:
            return
        self._next_clock = now + self._policy.clock_check_interval_s
        try:
            await self._network.check_clock()
        except ClockSkew:
            raise
        except NetworkError as error:
            logger.info("no peer to compare clocks with: %s", error)

    async def _rebootstrap_vanished(self, snapshot: Snapshot, now: float) -> None:
        """Reconnect the directory to peers that vanished from it: it may be we who were partitioned.

        So the halves of a swarm merge after a partition, and a node whose p2p daemon was restarted finds the others.
        """
        present = {node.peer for node in snapshot.nodes}
        for node in snapshot.nodes:
            if node.addresses and node.peer != self._network.transport.peer:
                self._known[node.peer] = node.addresses[0], now
        self._known = {peer: seen for peer, seen in self._known.items() if now - seen[1] < self._policy.peer_memory_s}
        vanished = sorted((-at, address) for peer, (address, at) in self._known.items() if peer not in present)
        if vanished and now >= self._next_rebootstrap:
            self._next_rebootstrap = now + self._policy.rebootstrap_interval_s
            await self._network.rebootstrap([address for _, address in vanished[: self._policy.rebootstrap_peers]])
