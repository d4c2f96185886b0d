"""Round trips to the possible next hops (ρ), measured by ping and smoothed by an EWMA.

Owns the measurements and the choice of peers. Clients read the result in our record and route by it. Peers that have
never answered are pinged as well, so that `Acquaintances` learns whether they exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from swarm.errors import NetworkError
from swarm.ewma import Ewma
from swarm.types import LayerSpan, NodeProfile, PeerId, Snapshot
from swarm_node.membership.acquaintances import Acquaintances
from swarm_node.membership.policy import RttPolicy

logger = logging.getLogger(__name__)


class Pinger(Protocol):
    async def rtt(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float = 5.0) -> float:
        """Milliseconds of a round trip. Raises NetworkError."""
        ...


class RttMonitor:
    """`link_ms` goes into our record; `await run(...)` in a task keeps it fresh."""

    def __init__(
        self,
        pinger: Pinger,
        own: PeerId,
        policy: RttPolicy = RttPolicy(),
        acquaintances: Acquaintances | None = None,
    ) -> None:
        self._acquaintances = acquaintances or Acquaintances(own)
        self._policy = policy
        self._pinger = pinger
        self._own = own
        self._ms: dict[PeerId, Ewma] = {}
        self._misses: dict[PeerId, int] = {}
        self._round = 0
        self._pinged: dict[PeerId, int] = {}  # in which round each was pinged last

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
            await asyncio.sleep(self._policy.interval_s)

    async def measure(self, snapshot: Snapshot, span: LayerSpan) -> None:
        """Ping some of the possible next hops, all of them in turn, round by round: those that have answered, and of
        the others half as many at least, so that invented ones take nobody's turn."""
        peers = possible_next_hops(snapshot, self._own, span)
        for gone in self._ms.keys() - {p.peer for p in peers}:
            self._forget(gone)
        count = self._policy.pings_per_round
        self._round += 1
        met = self._longest_ago([node for node in peers if node.peer in self._ms])
        unmet = self._longest_ago([node for node in peers if node.peer not in self._ms])
        chosen = [*met[: count // 2], *unmet, *met[count // 2 :]][:count]
        self._pinged = {node.peer: self._pinged[node.peer] for node in peers if node.peer in self._pinged}
        self._pinged |= {node.peer: self._round for node in chosen}
        others = self._strangers(snapshot, {node.peer for node in peers})
        async with asyncio.TaskGroup() as group:
            for node in chosen:
                group.create_task(self._ping(node))
            for node in others:
                group.create_task(self._meet(node))

    def _longest_ago(self, nodes: list[NodeProfile]) -> list[NodeProfile]:
        """Those that were pinged longest ago first."""
        return sorted(nodes, key=lambda node: (self._pinged.get(node.peer, 0), node.peer))

    def _strangers(self, snapshot: Snapshot, next_hops: Collection[PeerId]) -> list[NodeProfile]:
        nodes = {node.peer: node for node in snapshot.serving() if node.peer not in next_hops}
        waiting = [nodes[peer] for peer in self._acquaintances.strangers() if peer in nodes]
        return waiting[: self._policy.strangers_per_round]

    async def _meet(self, node: NodeProfile) -> None:
        """Ping a peer only to see whether it answers."""
        try:
            await self._pinger.rtt(node.peer, node.addresses)
        except NetworkError as error:
            logger.debug("no answer from %s: %s", node.peer, error)
            self._acquaintances.missed(node.peer)
        else:
            self._acquaintances.answered(node.peer)

    async def _ping(self, node: NodeProfile) -> None:
        try:
            one_way = await self._pinger.rtt(node.peer, node.addresses) / 2
        except NetworkError as error:
            self._acquaintances.missed(node.peer)
            self._misses[node.peer] = self._misses.get(node.peer, 0) + 1
            logger.debug("no answer from %s: %s", node.peer, error)
            if self._misses[node.peer] >= self._policy.max_misses:
                self._forget(node.peer)
            return
        self._misses.pop(node.peer, None)
        self._acquaintances.answered(node.peer)
        self._ms.setdefault(node.peer, Ewma(self._policy.decay)).update(one_way)

    def _forget(self, peer: PeerId) -> None:
        self._ms.pop(peer, None)
        self._misses.pop(peer, None)


def possible_next_hops(snapshot: Snapshot, own: PeerId, span: LayerSpan) -> list[NodeProfile]:
    """Serving nodes whose layers continue within or right after `span`, in order of peer id."""
    return [
        node
        for node in snapshot.serving()
        if node.peer != own and node.span is not None and node.span.start <= span.end < node.span.end
    ]
