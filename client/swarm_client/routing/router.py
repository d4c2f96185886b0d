"""Routing by one client: decides which nodes a chain consists of, on a fresh Snapshot of the swarm.

Owns the snapshot's age, the round-trip times that this client measured and its blocklist. It plans and opens nothing:
the search is `planner.routing`'s, and `SessionManager` opens the chains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """Fresher data finds better chains; reading and measuring it delays the first token."""

    max_snapshot_age_s: float = 1.0  # an older one is read again before a chain is chosen
    stale_snapshot_wait_s: float = 0.3  # how long a repair waits for a fresh one before it uses the old one
    link_age_s: float = 30.0  # how long a measured round trip is used
    ping_timeout_s: float = 0.6  # a node that is slower to answer counts as unmeasured
    max_pinged: int = 32  # nodes pinged before one choice
    max_rebootstrap_peers: int = 16  # addresses remembered for rejoining the DHT


class ChainRouter:
    """`wall_clock` dates records (seconds since the epoch); tests hand in their own. `rebootstrap`: see
    `ClientNetwork`."""

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
        rebootstrap: Callable[[Sequence[str]], Awaitable[int]] | None = None,
        policy: RouterPolicy = RouterPolicy(),
    ) -> None:
        self._rebootstrap = rebootstrap
        self._last_addresses: tuple[str, ...] = ()  # of the nodes of the last snapshot that had any
        self._policy = policy
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
        self._tasks = TaskSet("router")
        self._reading: asyncio.Task[NetworkError | None] | None = None

    async def close(self) -> None:
        await self._tasks.close()

    async def snapshot(self, *, fresh: bool = False, allow_stale: bool = False) -> Snapshot:
        """At most a second old, or a new one if `fresh`; with `allow_stale` the last one, if a new one takes too long.

        Raises NetworkError.
        """
        known = self._snapshot
        max_age_s = self._policy.max_snapshot_age_s
        if known is not None and not fresh and self._wall_clock() - known.observed_at <= max_age_s:
            return known
        if self._reading is None or self._reading.done():
            self._reading = self._tasks.start(self._read(), "snapshot")
        reading = self._reading
        use_stale = allow_stale and known is not None
        await asyncio.wait({reading}, timeout=self._policy.stale_snapshot_wait_s if use_stale else None)
        if not use_stale and (error := reading.result()) is not None:
            raise error
        assert self._snapshot is not None  # it has just been read, or was there before
        return self._snapshot

    async def _read(self) -> NetworkError | None:
        """Read a new snapshot. -> why there is none; not raised, for `allow_stale` callers may not wait for it."""
        now = self._wall_clock()
        try:
            records = await self._directory.read(self._model)
            known = self._last_addresses
            if not records and known and self._rebootstrap is not None and await self._rebootstrap(known):
                records = await self._directory.read(self._model)  # this client had lost its DHT peers
        except NetworkError as error:
            return error
        self._snapshot = to_snapshot(records, self._model, now, identity.verify, num_layers=self._num_layers)
        addresses = tuple(node.addresses[0] for node in self._snapshot.nodes if node.addresses)
        self._last_addresses = addresses[: self._policy.max_rebootstrap_peers] or self._last_addresses
        return None

    async def route(self, min_free_tokens: int = 0) -> tuple[Chain, Snapshot]:
        """The quickest chain now, from and back to this client. Raises NoRoute, WrongModel and NetworkError.

        Nodes with less KV space than `min_free_tokens` and blocked nodes are left out. One that was only slow, or that
        failed a while ago and answers now, is reinstated when there is no other route.
        """
        snapshot = await self.snapshot()
        if self._blocked(snapshot):
            snapshot = await self.snapshot(fresh=True)
        blocked = self._blocked(snapshot)
        await self._measure([n for n in snapshot.serving() if n.peer not in blocked])
        table = self._table(snapshot, min_free_tokens)
        try:
            chain = table.route(client_ms=self._client_ms(), banned=blocked)
        except NoRoute as error:
            await self._reinstate(snapshot)
            try:
                chain = table.route(client_ms=self._client_ms(), banned=self._blocked(snapshot, and_slow=False))
            except NoRoute:
                raise self._explain_no_route(snapshot, error) from None
        return chain, snapshot

    def reprice(self, chain: Chain, min_free_tokens: int = 0) -> Chain | None:
        """`chain` at its present cost, by the last snapshot; None if one of its hops would not take a session."""
        assert self._snapshot is not None  # the quickest chain was routed on one
        blocked, table = self._blocked(self._snapshot), self._table(self._snapshot, min_free_tokens)
        spans = {node.peer: node.span for group in table.groups.values() for node in group if node.peer not in blocked}
        for hop in chain.hops:
            span = spans.get(hop.peer)
            if span is None or hop.start < span.start or span.end < hop.end:
                return None
        try:
            return repair(table, chain, (), client_ms=self._client_ms(), banned=blocked).chain
        except NoRoute:  # its hops no longer match: one has other weights or another dtype since
            return None

    async def plan_repair(
        self,
        chain: Chain,
        lost: Collection[PeerId],
        min_free_tokens: int = 0,
        avoid: Collection[PeerId] = (),
        *,
        include_unresponsive: bool = False,
    ) -> tuple[Repair, Snapshot]:
        """Which nodes replace the hops of `lost` in `chain`. Raises NoRoute, and NetworkError without any snapshot.

        Replacements are not blocked and not in `avoid`: a peer that merely forgot the session may well get its hop
        back, a straggler only if there is no other, and with `include_unresponsive` one that failed a while ago and
        answers now.
        """
        snapshot = await self.snapshot(fresh=True, allow_stale=True)
        table = self._table(snapshot, min_free_tokens)
        left = replace(chain, hops=tuple(hop for hop in chain.hops if hop.peer not in lost))
        blocked = self._blocked(snapshot).union(avoid)
        try:
            return repair(table, left, (), client_ms=self._client_ms(), banned=blocked), snapshot
        except NoRoute:
            if include_unresponsive:
                await self._reinstate(snapshot)
            blocked = self._blocked(snapshot, and_slow=False).union(avoid)
            return repair(table, left, (), client_ms=self._client_ms(), banned=blocked), snapshot

    async def route_around(
        self, chain: Chain, hops: Sequence[PeerId], avoid: Collection[PeerId], min_free_tokens: int
    ) -> tuple[Chain, Snapshot]:
        """A chain without any peer of `chain` and `avoid`; else `chain` with others in place of one of `hops`, which
        are tried in turn. Raises NoRoute, and NetworkError without any snapshot."""
        snapshot = await self.snapshot()
        table = self._table(snapshot, min_free_tokens)
        blocked = self._blocked(snapshot).union(avoid)
        try:
            return table.route(client_ms=self._client_ms(), banned=blocked.union(chain.peers)), snapshot
        except NoRoute as error:
            why = error
        for peer in hops:
            try:
                return repair(table, chain, {peer}, client_ms=self._client_ms(), banned=blocked).chain, snapshot
            except NoRoute as error:
                why = error
        raise why

    def block(self, peer: PeerId, cause: NetworkError) -> None:
        """Route around a node for as long as `cause` suggests (`PeerBlocklist`)."""
        self._blocklist.add(peer, cause, asyncio.get_running_loop().time(), self._wall_clock())

    def _blocked(self, snapshot: Snapshot, *, and_slow: bool = True) -> frozenset[PeerId]:
        return self._blocklist.of(snapshot.nodes, asyncio.get_running_loop().time(), and_slow=and_slow)

    async def _reinstate(self, snapshot: Snapshot) -> None:
        """Unblock nodes that failed a while ago and answer pings: their new records take longer to reach us."""
        lost = self._blocklist.lost(snapshot.nodes, self._wall_clock())[: self._policy.max_pinged]
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
        """What a step along `chain` costs by the last snapshot; a node that is not in it gets the default costs."""
        assert self._snapshot is not None  # the chain was routed on one
        nodes = [self._snapshot.node(hop.peer) or _unknown(hop) for hop in chain.hops]
        index = {node.peer: i for i, node in enumerate(nodes)}
        rho = snapshot_rho(nodes)

        def link_ms(a: PeerId, b: PeerId) -> float:
            if not a or not b:
                return self._client_ms().get(a or b, DEFAULT_LINK_MS)
            return float(rho[index[a], index[b]])

        return ChainCosts.of(chain, replace(self._snapshot, nodes=tuple(nodes)), link_ms)

    def explain(self, chain: Chain) -> str:
        """Why this chain, in plain words."""
        if self._snapshot is None or any(self._snapshot.node(p) is None for p in chain.peers):
            return f"{chain}; a node of it has left the swarm since"
        return explain_snapshot(chain, self._snapshot, self._client_ms())

    def _explain_no_route(self, snapshot: Snapshot, error: NoRoute) -> NoRoute | WrongModel:
        """What is really missing: any nodes, nodes with our weights, nodes of our dtype, or layers."""
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
        """Ping the nodes whose round trip is unknown or old, all at once. A node that fails stays unmeasured."""
        now = asyncio.get_running_loop().time()
        age_s = self._policy.link_age_s
        stale = [n for n in nodes if now - self._links.get(n.peer, (-age_s, 0.0))[0] >= age_s]
        async with asyncio.TaskGroup() as group:
            for node in stale[: self._policy.max_pinged]:
                group.create_task(self._ping(node, now))

    async def _ping(self, node: NodeProfile, now: float) -> None:
        self._links.pop(node.peer, None)
        try:
            async with asyncio.timeout(self._policy.ping_timeout_s):
                await self._pool.rtt(node.peer, node.addresses)  # the first one also pays for the dial
                rtt = await self._pool.rtt(node.peer, node.addresses)
        except (TimeoutError, NetworkError):
            return  # routing assumes the default; opening the session will fail if the node is gone
        self._links[node.peer] = (now, rtt / 2.0)


def _unknown(hop: Hop) -> NodeProfile:
    return NodeProfile(hop.peer, "", NodeState.SERVING, "", "", len(hop.span), hop.span)
