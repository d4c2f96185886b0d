"""Routing by one client: decides which nodes a chain consists of, on a fresh Snapshot of the swarm.

Owns the snapshot's age, the blocklist, and the set of nodes that a chain is searched among: those that answer, and only
where these do not suffice some that merely claim. Plans and opens nothing: the search is `planner.routing`'s, what is
believed of nodes `planner.trust`'s, pings are `PeerContacts`'s, and `SessionManager` opens the chains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from swarm.address_blocks import claimed_block
from swarm.errors import NetworkError, NoRoute
from swarm.net.base.tasks import TaskSet
from swarm.net.gossip.record_reader import RecordReader
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.routing.load_spreading import spread_load
from swarm.planner.routing.repair import Repair, repair
from swarm.planner.routing.route import RouteTable
from swarm.planner.routing.rules import ChainRules
from swarm.planner.trust.belief import PeerBelief, believe, believed_snapshot, is_proven, strangers_of_late
from swarm.planner.trust.first_hop import FirstHopWishes, choose_first_hop, explain_rules
from swarm.planner.trust.shortlist import Sources, answering, covers, doubtful
from swarm.planner.trust.trial import Trial, TrustedChain, choose_chain, repair_chain
from swarm.types import Chain, NodeProfile, PeerId, Snapshot
from swarm_client.routing.blocklist import PeerBlocklist
from swarm_client.routing.contacts import PeerContacts
from swarm_client.routing.explanations import explain_chain, explain_no_route
from swarm_client.routing.link_costs import costs_by_snapshot
from swarm_client.trust.chain_watch import ChainWatch, StepTimes
from swarm_client.trust.peer_memory import PeerMemory


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """Fresher data finds better chains; reading and measuring it delays the first token."""

    max_snapshot_age_s: float = 1.0  # an older one is read again before a chain is chosen
    stale_snapshot_wait_s: float = 0.3  # how long a repair waits for a fresh one before it uses the old one
    route_wait_s: float = 0.05  # ... and a new answer, which goes by one that is at most ...
    stale_snapshot_age_s: float = 6.0  # ... so old: half a record's life
    max_reinstated: int = 32  # lost nodes pinged when there is no chain without them
    trial_s: float = 120.0  # after so long without an outcome another stranger may be tried


class ChainRouter:
    """`row_bytes`: of a hidden state. `wall_clock` dates records (seconds since the epoch); tests hand in their own.
    `memory`: what was seen of peers before. `draw`: random numbers in [0, 1). `rules`: of every chain; `known_first`:
    prefer one that begins with a peer known for long."""

    def __init__(
        self,
        reader: RecordReader,
        pool: ConnectionPool,
        *,
        dtype: str | None,
        weight_hash: str,
        row_bytes: int = 0,
        wall_clock: Callable[[], float] = time.time,
        memory: PeerMemory | None = None,
        draw: Callable[[], float] | None = None,
        policy: RouterPolicy = RouterPolicy(),
        rules: ChainRules = ChainRules(),
        known_first: bool = False,
    ) -> None:
        self._rules, self._known_first = rules, known_first
        self.memory = memory or PeerMemory()
        self._draw = draw or random.Random(os.urandom(16)).random
        self._trials: dict[PeerId, float] = {}  # strangers that answers try now -> since when, loop time
        self._policy, self._wall_clock = policy, wall_clock
        self._reader, self._pool = reader, pool
        self._dtype, self._weight_hash, self._row_bytes = dtype, weight_hash, row_bytes
        self._snapshot: Snapshot | None = None
        self._contacts = PeerContacts(pool, self._sources)
        self._blocklist = PeerBlocklist()
        self._tasks = TaskSet("router")
        self._reading: asyncio.Task[NetworkError | None] | None = None

    async def close(self) -> None:
        await self._contacts.close()
        await self._tasks.close()

    def look_around(self) -> None:
        """Read the swarm and ping nodes now, beside what else a start takes, so that the first route finds them."""
        self._tasks.start(self._look_around(), "first look")

    async def _look_around(self) -> None:
        with contextlib.suppress(NetworkError):  # a route will say so
            await self._reach(await self.snapshot(), 0)

    async def snapshot(self, *, fresh: bool = False, stale_after_s: float | None = None) -> Snapshot:
        """At most a second old, or a new one if `fresh`; the last one if a new one takes longer than `stale_after_s`.

        Raises NetworkError.
        """
        known = self._snapshot
        max_age_s = self._policy.max_snapshot_age_s
        if known is not None and not fresh and self._wall_clock() - known.observed_at <= max_age_s:
            return known
        if self._reading is None or self._reading.done():
            self._reading = self._tasks.start(self._read(), "snapshot")
        reading = self._reading
        use_stale = stale_after_s is not None and known is not None
        await asyncio.wait({reading}, timeout=stale_after_s if use_stale else None)
        if not use_stale and (error := reading.result()) is not None:
            raise error
        assert self._snapshot is not None  # it has just been read, or was there before
        return self._snapshot

    async def _read(self) -> NetworkError | None:
        """-> why there is no new snapshot; not raised, for nobody may be waiting for it."""
        try:
            self._snapshot = await self._reader.snapshot()
        except NetworkError as error:
            return error
        return None

    async def route(self, min_free_tokens: int = 0, stay: PeerId = "", change: PeerId = "") -> tuple[Chain, Snapshot]:
        """The quickest chain now, from and back to this client. Raises NoRoute, WrongModel and NetworkError.

        `stay`, `change`: the first stranger that a chain should have, or another one than that. Nodes with less KV
        space than `min_free_tokens` and blocked nodes are left out. One that was only slow, or that failed a while ago
        and answers now, is reinstated when there is no other route.
        """
        snapshot = await self._recent()
        if self._blocked(snapshot):
            snapshot = await self.snapshot(fresh=True, stale_after_s=self._policy.route_wait_s)
        await self._reach(snapshot, min_free_tokens)
        wishes = FirstHopWishes(self._known_first, stay, change)
        try:
            chosen = self._choose(self._answering(snapshot), min_free_tokens, self._blocked(snapshot), wishes)
        except NoRoute as error:
            snapshot = await self.snapshot(fresh=True)
            await self._reach(snapshot, min_free_tokens)
            await self._reinstate(snapshot)
            banned = self._blocked(snapshot, and_slow=False)
            choose = partial(self._choose, min_free_tokens=min_free_tokens, banned=banned, wishes=wishes)
            chosen = self._first_choice(snapshot, choose, error)
        if chosen.tried is not None:
            self._trials[chosen.tried] = asyncio.get_running_loop().time()
        return chosen.chain, snapshot

    def _first_choice(
        self, snapshot: Snapshot, choose: Callable[[Snapshot], TrustedChain], why_not: NoRoute
    ) -> TrustedChain:
        """A chain of nodes that answer, else with some that answered once, else with some that never did."""
        for seen in self._ever_wider(snapshot):
            with contextlib.suppress(NoRoute):
                return choose(seen)
        raise explain_no_route(snapshot, why_not, self._weight_hash, self._dtype) from None

    async def _recent(self) -> Snapshot:
        """A new snapshot, or the last one if reading takes longer than an answer should wait for it."""
        known, policy = self._snapshot, self._policy
        usable = known is not None and self._wall_clock() - known.observed_at <= policy.stale_snapshot_age_s
        return await self.snapshot(stale_after_s=policy.route_wait_s if usable else None)

    async def _reach(self, snapshot: Snapshot, min_free_tokens: int, avoid: Collection[PeerId] = ()) -> None:
        """Find a whole chain of nodes that answer, if there is none yet, and meet a few strangers beside it."""
        blocked = self._blocked(snapshot).union(avoid)
        usable = [node for node in self._fitting(snapshot) if node.peer not in blocked]
        shunned = self._shunned([node for node in usable if node.peer in self.memory.known], snapshot)

        def suffice() -> bool:
            found = [node for node in answering(usable, self._contacts.all, self._proven) if node.peer not in shunned]
            there = covers(found, snapshot.num_layers, min_free_tokens)
            return there and self._rules.may_be_kept(found, snapshot.num_layers)

        await self._contacts.reach(usable, suffice)

    def _shunned(self, nodes: Sequence[NodeProfile], snapshot: Snapshot) -> frozenset[PeerId]:
        beliefs = self._beliefs(replace(snapshot, nodes=tuple(nodes)))
        return frozenset(peer for peer, belief in beliefs.items() if belief.shunned)

    def _fitting(self, snapshot: Snapshot) -> list[NodeProfile]:
        """The nodes that serve what this client uses."""
        return [
            node
            for node in snapshot.serving()
            if node.weight_hash == self._weight_hash and self._dtype in (None, node.dtype) and self._rules.allows(node)
        ]

    def _answering(self, snapshot: Snapshot, also: Collection[PeerId] = ()) -> Snapshot:
        """`snapshot` with those nodes only that answer, and `also`."""
        known = {node.peer for node in answering(self._fitting(snapshot), self._contacts.all, self._proven)}
        return replace(snapshot, nodes=tuple(n for n in snapshot.nodes if n.peer in known or n.peer in also))

    def _ever_wider(self, snapshot: Snapshot, also: Collection[PeerId] = ()) -> Iterator[Snapshot]:
        """Those that answer, and `also`; then with those that once did; then with some that never did: they may be
        there, and only slow to answer."""
        yield self._answering(snapshot, also)
        for strangers in (False, True):
            more = doubtful(self._fitting(snapshot), self._contacts.all, self._proven, strangers=strangers)
            yield self._answering(snapshot, {node.peer for node in more}.union(also))

    @property
    def _proven(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, evidence in self.memory.known.items() if is_proven(evidence))

    def _sources(self) -> Sources:
        served = (peer for peer, evidence in self.memory.known.items() if evidence.sessions)
        chosen = {*self._reader.bootstrap_peers, *self._pool.dialled, *served, *self._rules.ends}
        return Sources(chosen, self._reader.book.introducers())

    def _choose(
        self, seen: Snapshot, min_free_tokens: int, banned: Collection[PeerId], wishes: FirstHopWishes
    ) -> TrustedChain:
        """The chain to take among the nodes of `seen`. Raises NoRoute."""
        beliefs = self._beliefs(seen)
        begun_after = asyncio.get_running_loop().time() - self._policy.trial_s
        self._trials = {peer: at for peer, at in self._trials.items() if at > begun_after}
        strangers = strangers_of_late(self.memory.known, self._wall_clock())
        trial = Trial(strangers, len(self._trials), self._draw(), self._draw())

        def solve(not_first: frozenset[PeerId]) -> TrustedChain:
            table = self._table(seen, beliefs, min_free_tokens, not_first)
            return choose_chain(table, beliefs, trial, client_ms=self._contacts.client_ms, banned=banned)

        return choose_first_hop(wishes, self._rules, seen.nodes, self.memory.known, self._wall_clock(), solve)

    def reprice(self, chain: Chain, min_free_tokens: int = 0) -> Chain | None:
        """`chain` at its present cost, by the last snapshot; None if one of its hops would not take a session."""
        assert self._snapshot is not None  # the quickest chain was routed on one
        seen = self._answering(self._snapshot, chain.peers)
        beliefs = self._beliefs(seen)
        table = self._table(seen, beliefs, min_free_tokens)
        blocked = self._blocked(seen) | {p for p, belief in beliefs.items() if belief.shunned}
        spans = {node.peer: node.span for group in table.groups.values() for node in group if node.peer not in blocked}
        for hop in chain.hops:
            span = spans.get(hop.peer)
            if span is None or hop.start < span.start or span.end < hop.end:
                return None
        try:
            return repair(table, chain, (), client_ms=self._contacts.client_ms, banned=blocked).chain
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

        Replacements answer, are not blocked and not in `avoid`: a peer that merely forgot the session may well get its
        hop back. With `include_unresponsive` others are looked for: strangers that answer, stragglers, those that
        failed a while ago and answer now, and last some that do not.
        """
        snapshot = await self.snapshot(fresh=True, stale_after_s=self._policy.stale_snapshot_wait_s)
        left = replace(chain, hops=tuple(hop for hop in chain.hops if hop.peer not in lost))
        blocked = self._blocked(snapshot).union(avoid)
        try:
            return self._repaired(self._answering(snapshot, left.peers), left, min_free_tokens, blocked), snapshot
        except NoRoute:
            if not include_unresponsive:
                raise
        await self._reach(snapshot, min_free_tokens, {*avoid, *lost})
        await self._reinstate(snapshot)
        blocked = self._blocked(snapshot, and_slow=False).union(avoid)
        why: NoRoute | None = None
        for seen in self._ever_wider(snapshot, left.peers):
            try:
                return self._repaired(seen, left, min_free_tokens, blocked), snapshot
            except NoRoute as error:
                why = error
        assert why is not None
        raise why

    def _repaired(self, seen: Snapshot, left: Chain, min_free_tokens: int, banned: Collection[PeerId]) -> Repair:
        """Raises NoRoute."""
        beliefs = self._beliefs(seen)

        def solve(not_first: frozenset[PeerId]) -> Repair:
            table = self._table(seen, beliefs, min_free_tokens, not_first)
            return repair_chain(table, left, beliefs, client_ms=self._contacts.client_ms, banned=banned)

        wishes = FirstHopWishes(self._known_first and not self._rules.keeps_first(left))
        return choose_first_hop(wishes, self._rules, seen.nodes, self.memory.known, self._wall_clock(), solve)

    async def route_around(self, chain: Chain, hops: Sequence[PeerId], min_free_tokens: int) -> Chain:
        """A chain without any peer of `chain`; else `chain` with others in place of one of `hops`, which are tried in
        turn. Raises NoRoute, and NetworkError without any snapshot."""
        snapshot = await self.snapshot()
        seen = self._answering(snapshot, chain.peers)
        table = self._table(seen, self._beliefs(seen), min_free_tokens)
        blocked = self._blocked(snapshot)
        try:
            return table.route(client_ms=self._contacts.client_ms, banned=blocked.union(chain.peers))
        except NoRoute as error:
            why = error
        for peer in hops:
            try:
                return repair(table, chain, {peer}, client_ms=self._contacts.client_ms, banned=blocked).chain
            except NoRoute as error:
                why = error
        raise why

    async def replace_hops(
        self, chain: Chain, hops: Collection[PeerId], avoid: Collection[PeerId], min_free_tokens: int
    ) -> Chain:
        """`chain` with others, not in `avoid`, in place of all of `hops`. Raises NoRoute, and NetworkError without any
        snapshot."""
        snapshot = await self.snapshot()
        seen = self._answering(snapshot, chain.peers)
        table = self._table(seen, self._beliefs(seen), min_free_tokens)
        banned = self._blocked(snapshot).union(avoid)
        return repair(table, chain, set(hops), client_ms=self._contacts.client_ms, banned=banned).chain

    def block(self, peer: PeerId, cause: NetworkError) -> None:
        """Route around a node for as long as `cause` suggests (`PeerBlocklist`)."""
        self._blocklist.add(peer, cause, asyncio.get_running_loop().time(), self._wall_clock())
        self.memory.failed(peer, cause, self._wall_clock(), self._block_of(peer))
        self._trials.pop(peer, None)

    def audited(self, peer: PeerId, passed: bool) -> None:
        """Remember what an audit came to."""
        self.memory.audited(peer, passed, self._wall_clock())

    def watch(self, chain: Chain) -> ChainWatch:
        """For the steps along `chain`, to be handed back to `took` and `served`."""
        assert self._snapshot is not None  # the chain was routed on one
        seen = replace(self._snapshot, nodes=tuple(n for n in self._snapshot.nodes if n.peer in chain.peers))
        return ChainWatch(chain, self.costs(chain), self._beliefs(seen), self._row_bytes)

    def took(self, times: StepTimes) -> None:
        """Remember how long a step took at each hop."""
        for peer, measured_ms in times.measured_ms.items():
            self.memory.took(peer, times.advertised_ms[peer], measured_ms, self._wall_clock())

    def served(self, watch: ChainWatch, failed: Collection[PeerId]) -> None:
        """A chain is done with: its hops but the `failed` ones have served well, if any step came back."""
        for hop in watch.chain.hops:
            peer = hop.peer
            self._trials.pop(peer, None)
            if watch.rows and peer not in failed:
                self.memory.served(peer, watch.rows, self._wall_clock(), self._block_of(peer), len(hop.span))
                self._contacts.served(peer)

    def _block_of(self, peer: PeerId) -> str:
        node = self._snapshot.node(peer) if self._snapshot is not None else None
        return claimed_block(node.addresses) if node is not None else ""

    def _beliefs(self, snapshot: Snapshot) -> dict[PeerId, PeerBelief]:
        return believe(snapshot, self.memory.known, self._wall_clock())

    def _blocked(self, snapshot: Snapshot, *, and_slow: bool = True) -> frozenset[PeerId]:
        return self._blocklist.of(snapshot.nodes, asyncio.get_running_loop().time(), and_slow=and_slow)

    async def _reinstate(self, snapshot: Snapshot) -> None:
        """Unblock nodes that failed a while ago and answer pings: their new records take longer to reach us."""
        lost = self._blocklist.lost(snapshot.nodes, self._wall_clock())[: self._policy.max_reinstated]
        await self._contacts.ask(lost)
        for node in lost:
            if node.peer in self._contacts.client_ms:
                self._blocklist.unblock(node.peer)

    def first_stranger(self, chain: Chain) -> PeerId | None:
        """The first hop that is neither this client's nor trusted."""
        return self._rules.first_stranger(chain)

    def _table(
        self,
        snapshot: Snapshot,
        beliefs: Mapping[PeerId, PeerBelief],
        min_free_tokens: int,
        not_first: frozenset[PeerId] = frozenset(),
    ) -> RouteTable:
        return RouteTable(
            spread_load(believed_snapshot(snapshot, beliefs), self._pool.peer),
            dtype=self._dtype,
            weight_hash=self._weight_hash,
            min_free_tokens=min_free_tokens,
            rules=replace(self._rules, not_first=not_first),
        )

    def costs(self, chain: Chain) -> ChainCosts:
        """What a step along `chain` costs by the last snapshot; a node that is not in it gets the default costs."""
        assert self._snapshot is not None  # the chain was routed on one
        return costs_by_snapshot(chain, self._snapshot, self._contacts.client_ms)

    def explain(self, chain: Chain) -> str:
        """Why this chain, in plain words."""
        if self._snapshot is None or any(self._snapshot.node(p) is None for p in chain.peers):
            return f"{chain}; a node of it has left the swarm since"
        seen = self._answering(self._snapshot, chain.peers)
        known, all_nodes = self.memory.known if self._known_first else None, len(self._snapshot.nodes)
        kept = explain_rules(self._rules, chain, seen.nodes, known, self._wall_clock())
        return explain_chain(chain, seen, all_nodes, self._contacts.client_ms, self._beliefs(seen), self._rules, kept)
