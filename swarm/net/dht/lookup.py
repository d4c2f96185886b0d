"""One search in the DHT for the peers nearest to a key, and what they hold there.

Owns whom to ask and how long to wait: as Kademlia does, the peers nearest to the key, by what each of them says, and
besides these the longest-known peers of our routing table, which nobody's words can replace. A peer that does not
answer holds up a search for a bounded time. Checks no signature.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.net.dht.entries import Entry
from swarm.net.dht.node_ids import dht_id
from swarm.net.dht.policy import DhtPolicy
from swarm.net.dht.protocol import CheckedDHTProtocol
from swarm.net.libp2p._hivemind import DHTID, DHTNode, PeerID, traverse_dht

_ENTRY_BYTES = 80  # of an entry besides its value


@dataclass(slots=True)
class LookupResult:
    """`answered`: who replied, the nearest to the key first. `replies`: what they hold, the anchors' first."""

    anchors: list[PeerID] = field(default_factory=list)
    answered: list[PeerID] = field(default_factory=list)
    replies: list[tuple[PeerID, list[Entry]]] = field(default_factory=list)

    @property
    def entry_bytes(self) -> int:
        """What all replies held, about."""
        return sum(len(entry.value) + _ENTRY_BYTES for _, reply in self.replies for entry in reply)


class Lookup:
    """Used once: `await Lookup(node, key, policy).run()`. `narrow`: ask a few of those that would be asked first."""

    def __init__(self, node: DHTNode, key: DHTID, policy: DhtPolicy, narrow: bool = False) -> None:
        self._narrow = narrow
        self._node = node
        self._protocol: CheckedDHTProtocol = node.protocol
        self._key = key
        self._policy = policy
        self._calls: dict[PeerID, asyncio.Task[dict[DHTID, PeerID]]] = {}
        self._entries: dict[PeerID, list[Entry]] = {}
        self._peers: dict[DHTID, PeerID] = {}

    async def run(self) -> LookupResult:
        """At most `patience_s` after the first reply, or when nobody answers within a call's timeout."""
        table = self._protocol.routing_table
        anchors = [peer for peer in table.anchors(self._key) if peer not in self._node.blacklist]
        async with asyncio.TaskGroup() as group:
            self._group = group
            if self._narrow:
                known = dict.fromkeys([*anchors, *self._nearest_known().values()])
                anchors = random.sample(list(known), min(self._policy.narrow_peers, len(known)))
            asking: set[asyncio.Task[object]] = {group.create_task(self._ask_once(peer)) for peer in anchors}
            if not self._narrow:
                asking.add(group.create_task(self._traverse()))
            if not asking:
                return LookupResult()
            _, late = await asyncio.wait(asking, timeout=self._policy.patience_s)
            while late and not self._entries:
                _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
            for task in (*late, *self._calls.values()):
                task.cancel()
        answered = sorted(self._entries, key=lambda peer: self._key.xor_distance(dht_id(peer)))
        first = dict.fromkeys([*(peer for peer in anchors if peer in self._entries), *answered])
        return LookupResult(anchors, answered, [(peer, self._entries[peer]) for peer in first])

    async def _traverse(self) -> None:
        self._peers.update(self._nearest_known())
        if self._peers:
            await traverse_dht(
                queries=[self._key],
                initial_nodes=list(self._peers),
                beam_size=self._policy.beam_size,
                num_workers=self._policy.num_workers,
                queries_per_call=1,
                get_neighbors=self._neighbors,
                visited_nodes={self._key: {self._node.node_id}},
            )

    def _nearest_known(self) -> dict[DHTID, PeerID]:
        nearest = self._protocol.routing_table.get_nearest_neighbors(self._key, self._protocol.bucket_size)
        return self._usable(dict(nearest))

    async def _neighbors(
        self, node_id: DHTID, queries: Collection[DHTID]
    ) -> dict[DHTID, tuple[tuple[DHTID, ...], bool]]:
        nearest = await self._ask_once(self._peers[node_id])
        self._peers.update(nearest)
        return {self._key: (tuple(nearest), False)}

    async def _ask_once(self, peer: PeerID) -> dict[DHTID, PeerID]:
        """The peers that `peer` knows nearest to the key."""
        call = self._calls.get(peer)
        if call is None:
            call = self._calls[peer] = self._group.create_task(self._ask(peer))
        return await call

    async def _ask(self, peer: PeerID) -> dict[DHTID, PeerID]:
        if peer in self._node.blacklist:
            return {}
        found = await self._protocol.call_find(peer, [self._key])
        if found is None:
            self._node.blacklist.register_failure(peer)
            return {}
        self._node.blacklist.register_success(peer)
        self._entries[peer], nearest = found[self._key]
        return self._usable(nearest)

    def _usable(self, peers: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        return {place: peer for place, peer in peers.items() if peer not in self._node.blacklist}
