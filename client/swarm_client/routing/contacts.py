"""Whom this client has reached: pings to the nodes of a snapshot, a few strangers at a time.

Owns the round trips measured and what became of each ping. Whom to ping first, and which nodes a chain is searched
among, is decided by `swarm.planner.trust.shortlist`; nothing here waits longer than a search for the first chain needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.address_blocks import claimed_block
from swarm.errors import NetworkError
from swarm.net.base.tasks import TaskSet
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.planner.trust.shortlist import NEVER, Contact, Sources, to_try
from swarm.types import NodeProfile, PeerId


@dataclass(frozen=True, slots=True)
class ContactPolicy:
    """More pings find better chains sooner; but records name anybody's addresses, and so would make clients attack."""

    link_age_s: float = 30.0  # how long a measured round trip is used
    ping_timeout_s: float = 0.6  # a node that is slower to answer counts as unmeasured
    max_pinged: int = 32  # nodes that are known to answer, measured anew before one choice
    max_tried: int = 16  # strangers pinged at a time while those that answer hold no whole chain ...
    hedge_s: float = 0.15  # ... of which one that has not answered for so long counts no more ...
    max_open: int = 48  # ... until so many are open
    max_beside: int = 4  # ... and when they do, beside the work
    beside_interval_s: float = 2.0  # between two such rounds
    search_s: float = 3.0  # a search for a first chain that answers
    grace_s: float = 0.1  # once there is one, others may answer for so long, or as long again as it took
    max_contacts: int = 4096  # remembered; who never answered and was asked longest ago is forgotten first


class PeerContacts:
    """`sources()`: by whom nodes came to be known."""

    def __init__(
        self, pool: ConnectionPool, sources: Callable[[], Sources], policy: ContactPolicy = ContactPolicy()
    ) -> None:
        self._pool = pool
        self._sources = sources
        self._policy = policy
        self._contacts: dict[PeerId, Contact] = {}
        self._client_ms: dict[PeerId, float] = {}
        self._pings: dict[PeerId, tuple[asyncio.Task[None], float]] = {}  # and since when
        self._next_beside = float("-inf")
        self._tasks = TaskSet("contacts")

    async def close(self) -> None:
        await self._tasks.close()

    @property
    def all(self) -> Mapping[PeerId, Contact]:
        return self._contacts

    @property
    def client_ms(self) -> Mapping[PeerId, float]:
        """One way, of those measured: half the round trip."""
        return self._client_ms

    def served(self, peer: PeerId) -> None:
        """A session has ended well there, which says more than a ping."""
        known = self._contacts.get(peer, NEVER)
        if not known.answered or known.misses:
            self._contacts[peer] = replace(known, answered=True, misses=0)

    async def reach(self, nodes: Sequence[NodeProfile], suffice: Callable[[], bool]) -> None:
        """Ping those of `nodes` (that may be used now) whose round trip is old or unknown, until `suffice()` says that
        those that answer will do, and a little longer; those known to answer first. Raises nothing."""
        loop = asyncio.get_running_loop()
        begun, policy = loop.time(), self._policy
        waiting = {self._ping(node) for node in self._stale(nodes, begun)[: policy.max_pinged]}
        until = begun + policy.search_s
        usable, enough = {node.peer for node in nodes}, False
        while True:
            now = loop.time()
            if not enough and suffice():
                enough, until = True, min(until, now + max(policy.grace_s, now - begun))
            if enough:
                self._beside(nodes, now)
            else:
                waiting |= {ping for peer, (ping, _) in self._pings.items() if peer in usable}
                late = sum(now - since >= policy.hedge_s for _, since in self._pings.values())
                open_pings = len(self._pings)
                waiting |= self._try(
                    nodes, now, min(policy.max_tried - open_pings + late, policy.max_open - open_pings)
                )
            waiting = {ping for ping in waiting if not ping.done()}
            if not waiting or now >= until:
                return
            patience_s = until - now if enough else min(until - now, policy.hedge_s)
            _, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)

    async def ask(self, nodes: Iterable[NodeProfile]) -> None:
        """Ping all of `nodes`, a few, whatever became of earlier pings."""
        if pings := {self._ping(node) for node in nodes}:
            await asyncio.wait(pings)

    def _stale(self, nodes: Iterable[NodeProfile], now: float) -> list[NodeProfile]:
        """Those that answered once, and were not asked lately; sooner again if they missed the last ping."""
        found = []
        for node in nodes:
            known = self._contacts.get(node.peer, NEVER)
            age_s = self._policy.link_age_s
            if known.misses:
                age_s = min(age_s, self._policy.beside_interval_s * 2.0 ** min(known.misses, 8))
            if known.answered and now - known.at >= age_s:
                found.append(node)
        return found

    def _try(self, nodes: Sequence[NodeProfile], now: float, count: int) -> set[asyncio.Task[None]]:
        if count <= 0 or self._tasks.closed:
            return set()
        free = [node for node in nodes if node.peer not in self._pings]
        return {self._ping(node) for node in to_try(free, self._contacts, self._sources(), now, count)}

    def _beside(self, nodes: Sequence[NodeProfile], now: float) -> None:
        """Meet some strangers while a chain of others does the work. Does not wait for them."""
        if now >= self._next_beside:
            self._next_beside = now + self._policy.beside_interval_s
            self._try(nodes, now, self._policy.max_beside - len(self._pings))

    def _ping(self, node: NodeProfile) -> asyncio.Task[None]:
        if node.peer in self._pings:
            return self._pings[node.peer][0]
        ping = self._tasks.start(self._measure(node), f"ping {node.peer}")
        self._pings[node.peer] = ping, asyncio.get_running_loop().time()
        ping.add_done_callback(lambda _: self._pings.pop(node.peer, None))
        return ping

    async def _measure(self, node: NodeProfile) -> None:
        now = asyncio.get_running_loop().time()
        known = self._contacts.get(node.peer, NEVER)
        block = claimed_block(node.addresses)
        try:
            async with asyncio.timeout(self._policy.ping_timeout_s):
                await self._pool.rtt(node.peer, node.addresses)  # the first one also pays for the dial
                rtt = await self._pool.rtt(node.peer, node.addresses)
        except (TimeoutError, NetworkError):
            self._client_ms.pop(node.peer, None)
            self._contacts[node.peer] = Contact(known.answered, known.misses + 1, now, block)
        else:
            self._client_ms[node.peer] = rtt / 2.0
            self._contacts[node.peer] = Contact(True, 0, now, block)
        self._forget()

    def _forget(self) -> None:
        if len(self._contacts) <= self._policy.max_contacts:
            return
        oldest = sorted(self._contacts.items(), key=lambda item: (item[1].answered, item[1].at))
        for peer, _ in oldest[: self._policy.max_contacts // 8]:
            del self._contacts[peer]
            self._client_ms.pop(peer, None)
