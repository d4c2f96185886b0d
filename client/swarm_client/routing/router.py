"""The client's view of the swarm: a fresh Snapshot when one is needed, and the chain it picks.

Owns the snapshot's age, the link times that this client measured and the nodes it leaves out for now. The choice itself
is `plan.routing`'s and `plan.repair`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from swarm.errors import NetworkError, NoRoute, WrongModel
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Directory
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.security import identity
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.routing.load_spreading import spread_load
from swarm.planner.routing.repair import Repair, repair
from swarm.planner.routing.route import DEFAULT_LINK_MS, RouteTable, explain_snapshot, snapshot_rho
from swarm.records import to_snapshot
from swarm.types import Chain, Hop, NodeProfile, NodeState, PeerId, Snapshot
from swarm_client.routing.blocklist import PeerBlocklist

MAX_AGE_S = 1.0
LINK_AGE_S = 30.0  # how long a measured link time is believed
PING_TIMEOUT_S = 0.6  # a node that is slower than this to answer counts as unmeasured
MAX_PINGED = 32
MAX_REBOOTSTRAP_PEERS = 16
STALE_OK_S = 0.3  # how long a repair waits for a newer map than the one at hand


class ChainRouter:
    """`wall_clock` dates records (seconds since the epoch); tests hand in their own. `meet`: see `network.Network`."""

    def __init__(
        self,
        directory: Directory,
        pool: ConnectionPool,
        model: str,
        num_layers: int,
        *,
        dtype: str | None,
        weight_hash: str,
        wall_clock: Callable[[], float] = time.time,
        meet: Callable[[Sequence[str]], Awaitable[int]] | None = None,
    ) -> None:
        self._meet = meet
        self._met: tuple[str, ...] = ()  # addresses of those that were there when last anybody was
        self._directory = directory
        self._pool = pool
        self._model = model
        self._num_layers = num_layers
        self._dtype = dtype
        self._weight_hash = weight_hash
        self._wall_clock = wall_clock
        self._snapshot: Snapshot | None = None
        self._links: dict[PeerId, tuple[float, float]] = {}  # peer -> (when measured, one-way ms)
        self._blocklist = PeerBlocklist()
        self._scope = TaskSet("view")
        self._reading: asyncio.Task[NetworkError | None] | None = None

    async def close(self) -> None:
        await self._scope.close()

    async def snapshot(self, *, fresh: bool = False, hurry: bool = False) -> Snapshot:
        """At most a second old unless `fresh`; in a `hurry` the one at hand will do if a newer one is not quick to get.

        Raises NetworkError.
        """
        known = self._snapshot
        if known is not None and not fresh and self._wall_clock() - known.observed_at <= MAX_AGE_S:
            return known
        if self._reading is None or self._reading.done():
            self._reading = self._scope.start(self._read(), "snapshot")
        reading = self._reading
        await asyncio.wait({reading}, timeout=STALE_OK_S if hurry and known is not None else None)
        if not (hurry and known is not None) and (error := reading.result()) is not None:
            raise error
        assert self._snapshot is not None  # it has just been read, or was there before
        return self._snapshot

    async def _read(self) -> NetworkError | None:
        """Get a new snapshot. -> why there is none; readers that have given up waiting leave the error to nobody."""
        now = self._wall_clock()
        try:
            records = await self._directory.read(self._model)
            if not records and self._met and self._meet is not None and await self._meet(self._met):
                records = await self._directory.read(self._model)  # it was us who knew nobody any more
        except NetworkError as error:
            return error
        self._snapshot = to_snapshot(records, self._model, now, identity.verify, num_layers=self._num_layers)
        addresses = tuple(node.addresses[0] for node in self._snapshot.nodes if node.addresses)
        self._met = addresses[:MAX_REBOOTSTRAP_PEERS] or self._met
        return None

    async def route(self, min_free_tokens: int = 0) -> tuple[Chain, Snapshot]:
        """The quickest chain now, from and back to this client. Raises NoRoute, WrongModel and NetworkError.

        Left out are nodes with less room than `min_free_tokens` and those that are banned. One that was only slow, or
        lost a while ago and answers, is taken back when there is no other way.
        """
        snapshot = await self.snapshot()
        if self._blocked(snapshot):
            snapshot = await self.snapshot(fresh=True)
        banned = self._blocked(snapshot)
        await self._measure([n for n in snapshot.serving() if n.peer not in banned])
        table = self._table(snapshot, min_free_tokens)
        try:
            chain = table.route(client_ms=self._client_ms(), banned=banned)
        except NoRoute as error:
            await self._reinstate(snapshot)
            try:
                chain = table.route(client_ms=self._client_ms(), banned=self._blocked(snapshot, and_slow=False))
            except NoRoute:
                raise self._explain_no_route(snapshot, error) from None
        return chain, snapshot

    def reprice(self, chain: Chain, min_free_tokens: int = 0) -> Chain | None:
        """`chain` at what it costs now, by the map at hand; None if one of its hops would not take a session."""
        assert self._snapshot is not None  # the quickest chain was routed on one
        banned, table = self._blocked(self._snapshot), self._table(self._snapshot, min_free_tokens)
        spans = {node.peer: node.span for group in table.groups.values() for node in group if node.peer not in banned}
        for hop in chain.hops:
            span = spans.get(hop.peer)
            if span is None or hop.start < span.start or span.end < hop.end:
                return None
        try:
            return repair(table, chain, (), client_ms=self._client_ms(), banned=banned).chain
        except NoRoute:  # its hops no longer go together: one has other weights or another dtype since
            return None

    async def repair(
        self,
        chain: Chain,
        lost: Collection[PeerId],
        min_free_tokens: int = 0,
        avoid: Collection[PeerId] = (),
        *,
        include_unresponsive: bool = False,
    ) -> tuple[Repair, Snapshot]:
        """How `chain` goes on without the hops of `lost`. Raises NoRoute, and NetworkError without any snapshot.

        Who gets the new hops is a matter of bans: a peer that merely forgot the session may well get its hop back, and
        one that was only slow if there is no other, and to `insist` one that was lost a while ago and answers. Banned
        for this time are those to `avoid` as well.
        """
        snapshot = await self.snapshot(fresh=True, hurry=True)
        table = self._table(snapshot, min_free_tokens)
        left = replace(chain, hops=tuple(hop for hop in chain.hops if hop.peer not in lost))
        banned = self._blocked(snapshot).union(avoid)
        try:
            return repair(table, left, (), client_ms=self._client_ms(), banned=banned), snapshot
        except NoRoute:
            if include_unresponsive:
                await self._reinstate(snapshot)
            banned = self._blocked(snapshot, and_slow=False).union(avoid)
            return repair(table, left, (), client_ms=self._client_ms(), banned=banned), snapshot

    def block(self, peer: PeerId, cause: NetworkError) -> None:
        """Leave a node out, for as long as `cause` suggests (`bans`)."""
        self._blocklist.add(peer, cause, asyncio.get_running_loop().time(), self._wall_clock())

    def _blocked(self, snapshot: Snapshot, *, and_slow: bool = True) -> frozenset[PeerId]:
        return self._blocklist.of(snapshot.nodes, asyncio.get_running_loop().time(), and_slow=and_slow)

    async def _reinstate(self, snapshot: Snapshot) -> None:
        """Nodes that were lost a while ago, but answer: what they publish reaches us later than their voice."""
        lost = self._blocklist.lost(snapshot.nodes, self._wall_clock())[:MAX_PINGED]
        now = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._ping(node, now) for node in lost))
        for node in lost:
            if node.peer in self._links:
                self._blocklist.unblock(node.peer)

    def _table(self, snapshot: Snapshot, min_free_tokens: int) -> RouteTable:
        return RouteTable(
            spread_load(snapshot, self._pool.peer),
            dtype=self._dtype,
            weight_hash=self._weight_hash,
            min_free_tokens=min_free_tokens,
        )

    def costs(self, chain: Chain) -> ChainCosts:
        """What a step along `chain` costs by the live map; a node that has left it is assumed to be ordinary."""
        assert self._snapshot is not None  # the chain was routed on one
        nodes = [self._snapshot.node(hop.peer) or _unknown(hop) for hop in chain.hops]
        place = {node.peer: i for i, node in enumerate(nodes)}
        rho = snapshot_rho(nodes)

        def link_ms(a: PeerId, b: PeerId) -> float:
            if not a or not b:
                return self._client_ms().get(a or b, DEFAULT_LINK_MS)
            return float(rho[place[a], place[b]])

        return ChainCosts.of(chain, replace(self._snapshot, nodes=tuple(nodes)), link_ms)

    def explain(self, chain: Chain) -> str:
        """Why this chain, in plain words."""
        if self._snapshot is None or any(self._snapshot.node(p) is None for p in chain.peers):
            return f"{chain}; a node of it has left the swarm since"
        return explain_snapshot(chain, self._snapshot, self._client_ms())

    def _explain_no_route(self, snapshot: Snapshot, error: NoRoute) -> NoRoute | WrongModel:
        """Say what is really missing: nodes at all, nodes with our weights, nodes of our dtype, or layers."""
        serving = snapshot.serving()
        if not serving:
            waiting = len(snapshot.nodes)
            state = f"; {waiting} are still loading" if waiting else ""
            return NoRoute(f"no node of this swarm serves the model '{self._model}'{state}", error.missing)
        same = [n for n in serving if n.weight_hash == self._weight_hash]
        if not same:
            return WrongModel(
                f"{len(serving)} nodes serve '{self._model}' with other weights than yours; "
                "name the model file they use with --model"
            )
        if self._dtype is not None and all(n.dtype != self._dtype for n in same):
            served = ", ".join(sorted({n.dtype for n in same}))
            return NoRoute(f"no node serves '{self._model}' in {self._dtype}; there is {served}", error.missing)
        return error

    def _client_ms(self) -> dict[PeerId, float]:
        return {peer: ms for peer, (_, ms) in self._links.items()}

    async def _measure(self, nodes: list[NodeProfile]) -> None:
        """Ping the nodes whose link time is unknown or old, all at once. A node that fails keeps no figure."""
        now = asyncio.get_running_loop().time()
        stale = [n for n in nodes if now - self._links.get(n.peer, (-LINK_AGE_S, 0.0))[0] >= LINK_AGE_S][:MAX_PINGED]
        async with asyncio.TaskGroup() as group:
            for node in stale:
                group.create_task(self._ping(node, now))

    async def _ping(self, node: NodeProfile, now: float) -> None:
        self._links.pop(node.peer, None)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self._pool.rtt(node.peer, node.addresses)  # the first one also pays for the dial
                rtt = await self._pool.rtt(node.peer, node.addresses)
        except (TimeoutError, NetworkError):
            return  # routing falls back to what it assumes of strangers; opening the session will tell
        self._links[node.peer] = (now, rtt / 2.0)


def _unknown(hop: Hop) -> NodeProfile:
    return NodeProfile(hop.peer, "", NodeState.SERVING, "", "", len(hop.span), hop.span)
