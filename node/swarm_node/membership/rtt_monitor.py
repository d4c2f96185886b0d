"""How far the peers are that this node could hand over to: ρ, measured by ping.

Owns the measurements and whom to measure. Knows no session; routing is for those who read our record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from swarm.errors import NetworkError
from swarm.ewma import Ewma
from swarm.types import LayerSpan, NodeProfile, PeerId, Snapshot

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
MAX_NEIGHBOURS = 8  # pinged in one round
EWMA_DECAY = 0.7  # weight of what was measured before
FORGET_AFTER = 3  # rounds in a row that a peer did not answer


class Pinger(Protocol):
    async def rtt(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float = 5.0) -> float:
        """Milliseconds of a round trip. Raises NetworkError."""
        ...


class RttMonitor:
    """`link_ms` is what our record says; `await run(...)` in a task keeps it fresh."""

    def __init__(self, pinger: Pinger, own: PeerId) -> None:
        self._pinger = pinger
        self._own = own
        self._ms: dict[PeerId, Ewma] = {}
        self._misses: dict[PeerId, int] = {}
        self._round = 0

    @property
    def link_ms(self) -> dict[PeerId, float]:
        """ρ, one way: half the round trip."""
        return {peer: mean.value for peer, mean in self._ms.items()}

    async def run(self, snapshot: Callable[[], Awaitable[Snapshot]], span: Callable[[], LayerSpan | None]) -> None:
        while True:
            try:
                current = span()
                if current is not None:
                    await self.measure(await snapshot(), current)
            except NetworkError as error:
                logger.info("no snapshot to measure links by: %s", error)
            await asyncio.sleep(INTERVAL_S)

    async def measure(self, snapshot: Snapshot, span: LayerSpan) -> None:
        """Ping the likely next hops once, some at a time, all of them in turn."""
        peers = possible_next_hops(snapshot, self._own, span)
        for gone in self._ms.keys() - {p.peer for p in peers}:
            self._forget(gone)
        turn = self._round * MAX_NEIGHBOURS % max(1, len(peers))
        self._round += 1
        async with asyncio.TaskGroup() as group:
            for node in (peers[turn:] + peers[:turn])[:MAX_NEIGHBOURS]:
                group.create_task(self._ping(node))

    async def _ping(self, node: NodeProfile) -> None:
        try:
            one_way = await self._pinger.rtt(node.peer, node.addresses) / 2
        except NetworkError as error:
            self._misses[node.peer] = self._misses.get(node.peer, 0) + 1
            logger.debug("no answer from %s: %s", node.peer, error)
            if self._misses[node.peer] >= FORGET_AFTER:
                self._forget(node.peer)
            return
        self._misses.pop(node.peer, None)
        self._ms.setdefault(node.peer, Ewma(EWMA_DECAY)).update(one_way)

    def _forget(self, peer: PeerId) -> None:
        self._ms.pop(peer, None)
        self._misses.pop(peer, None)


def possible_next_hops(snapshot: Snapshot, own: PeerId, span: LayerSpan) -> list[NodeProfile]:
    """Serving nodes that could take over within or right after `span`, in order of peer id."""
    return [
        node
        for node in snapshot.serving()
        if node.peer != own and node.span is not None and node.span.start <= span.end < node.span.end
    ]
