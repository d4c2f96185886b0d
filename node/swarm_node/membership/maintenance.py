"""What a node does every second or two besides serving: look at the swarm, move where it is needed, stay in touch.

Owns the beat, the memory of whom we have met, and when the clock is checked. When to move is `swarm.planner.rebalancing.rebalancer`'s and
how is `moving`'s: every node computes the same target from the same snapshot, and makes a move only when it is in the
first wave, so nothing is to be agreed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarm.errors import ClockSkew, NetworkError, OutOfMemory
from swarm.planner.rebalancing.rebalancer import RebalanceDecision, Rebalancer
from swarm.types import PeerId, Snapshot
from swarm_node.network.connection import NodeNetwork

logger = logging.getLogger(__name__)

TICK_S = 1.0
REBOOTSTRAP_EVERY_S = 3.0
REBOOTSTRAP_PEERS = 8
REMEMBER_S = 600.0  # how long somebody who is gone may come back and be known
CLOCK_EVERY_S = 10.0


class MaintenanceLoop:
    """`await run()` in a task.

    `look()`: the nodes that could be in one chain with us, ourselves as we are now. `settled()`: whether we serve.
    `move` carries a decision to move out.
    """

    def __init__(
        self,
        network: NodeNetwork,
        keeper: Rebalancer,
        *,
        look: Callable[[], Awaitable[Snapshot]],
        settled: Callable[[], bool],
        move: Callable[[RebalanceDecision], Awaitable[None]],
    ) -> None:
        self._network = network
        self._keeper = keeper
        self._look = look
        self._settled = settled
        self._move = move
        self._met: dict[PeerId, tuple[str, float]] = {}  # address, when last seen
        self._next_meeting = self._next_clock = 0.0

    async def run(self) -> None:
        """Raises ClockSkew; every other trouble with the network passes."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            try:
                snapshot = await self._look()
                await self._stay_in_touch(snapshot, loop.time())
            except NetworkError as error:
                logger.info("no look at the swarm: %s", error)
                continue
            await self._check_clock(loop.time())
            if self._settled():
                await self._keep(snapshot, loop.time())

    async def _keep(self, snapshot: Snapshot, now: float) -> None:
        decision = self._keeper.observe(snapshot, now)
        if decision.move is None:
            logger.debug("stays: %s", decision.reason)
            return
        self._keeper.moved(now)
        try:
            await self._move(decision)
        except OutOfMemory as error:
            logger.warning("stays where it is: %s", error)

    async def _check_clock(self, now: float) -> None:
        if now < self._next_clock:
            return
        self._next_clock = now + CLOCK_EVERY_S
        try:
            await self._network.check_clock()
        except ClockSkew:
            raise
        except NetworkError as error:
            logger.info("no peer to compare clocks with: %s", error)

    async def _stay_in_touch(self, snapshot: Snapshot, now: float) -> None:
        """Look up those who have vanished from the map: it may be our own map that was torn.

        So halves of a swarm find each other when the network between them is whole again, and a node whose p2p daemon
        was started anew finds the others.
        """
        here = {node.peer for node in snapshot.nodes}
        for node in snapshot.nodes:
            if node.addresses and node.peer != self._network.transport.peer:
                self._met[node.peer] = node.addresses[0], now
        self._met = {peer: met for peer, met in self._met.items() if now - met[1] < REMEMBER_S}
        vanished = sorted((-at, address) for peer, (address, at) in self._met.items() if peer not in here)
        if vanished and now >= self._next_meeting:
            self._next_meeting = now + REBOOTSTRAP_EVERY_S
            await self._network.rebootstrap([address for _, address in vanished[:REBOOTSTRAP_PEERS]])
