"""The routing table of a DHT node: Kademlia's, bounded, with address blocks and the longest-known peers.

Owns who is in it: a full bucket keeps its peers while they answer, as Kademlia's does, but for those of an address
block that has more than its share. Knows no network; `blocks` says where a peer was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from swarm.address_blocks import UNKNOWN_BLOCK, is_public_block, spread
from swarm.net.dht.policy import RoutingTablePolicy
from swarm.net.libp2p._hivemind import DHTID, KBucket, PeerID, RoutingTable


class BoundedRoutingTable(RoutingTable):  # type: ignore[misc]  # hivemind is untyped
    """`met`: when each peer was met first, by `clock`; kept when it leaves the table, for it may come back."""

    def __init__(
        self,
        node_id: DHTID,
        policy: RoutingTablePolicy,
        clock: Callable[[], float],
        block_of: Callable[[PeerID], str] = lambda peer: UNKNOWN_BLOCK,
    ) -> None:
        super().__init__(node_id, policy.bucket_size, policy.depth_modulo)
        self._policy = policy
        self._clock = clock
        self._block_of = block_of
        self.met: dict[PeerID, float] = {}
        self._unanswered: dict[PeerID, int] = {}

    def add_or_update_node(self, node_id: DHTID, peer_id: PeerID) -> tuple[DHTID, PeerID] | None:
        to_ping: tuple[DHTID, PeerID] | None = super().add_or_update_node(node_id, peer_id)
        self._unanswered.pop(peer_id, None)
        if node_id in self.uid_to_peer_id:
            self.met.setdefault(peer_id, self._clock())
        if len(self.met) > self._policy.max_met * 9 // 8:
            self._forget()
        bucket = self.buckets[self.get_bucket_index(node_id)]
        if node_id in bucket.replacement_nodes and self._displace(bucket, peer_id):
            return None
        while len(bucket.replacement_nodes) > self._policy.bucket_size:  # those who wait longer stay
            newest = next(reversed(bucket.replacement_nodes))
            del self[newest]
        return to_ping

    def did_not_answer(self, node_id: DHTID) -> None:
        """Remove a peer that fails again and again: one lost call must not cost the long-known their place."""
        peer = self.uid_to_peer_id.get(node_id)
        if peer is not None:
            self._unanswered[peer] = self._unanswered.get(peer, 0) + 1
            if self._unanswered[peer] >= self._policy.max_unanswered:
                del self[node_id]

    def __delitem__(self, node_id: DHTID) -> None:
        self._unanswered.pop(self.uid_to_peer_id[node_id], None)
        super().__delitem__(node_id)

    def _displace(self, bucket: KBucket, newcomer: PeerID) -> bool:
        """Make room in a full bucket at the cost of an address block that has more than its share of it."""
        members: dict[DHTID, PeerID] = bucket.nodes_to_peer_id
        used = Counter(block for peer in members.values() if is_public_block(block := self._block_of(peer)))
        block, count = max(used.items(), key=lambda item: item[1], default=("", 0))
        if count <= bucket.size * self._policy.bucket_block_share or self._block_of(newcomer) == block:
            return False
        newest = max((self.met.get(peer, 0.0), uid) for uid, peer in members.items() if self._block_of(peer) == block)
        waiting = bucket.replacement_nodes
        uid = next(uid for uid, peer in waiting.items() if peer == newcomer)
        waiting[uid] = waiting.pop(uid)  # the bucket takes the last of them when it loses a member
        del self[newest[1]]
        return True

    def get_nearest_neighbors(
        self, query_id: DHTID, k: int, exclude: DHTID | None = None
    ) -> list[tuple[DHTID, PeerID]]:
        """As hivemind's, but that no public address block has more than its share while there are others."""
        nearest = super().get_nearest_neighbors(query_id, 4 * k, exclude)
        return spread(nearest, k, lambda item: self._block_of(item[1]), lambda block: self._most(block, k))

    def anchors(self, key: DHTID) -> list[PeerID]:
        """The peers to ask whatever others say: of the longest known, those nearest to `key`.

        Whoever comes later, in whatever numbers and wherever in the space of ids, is not among them while they answer.
        Everybody takes those nearest to the key, so that writers and readers meet.
        """
        oldest = sorted(self.peer_id_to_uid, key=lambda peer: (self.met.get(peer, 0.0), self.peer_id_to_uid[peer]))
        size = self._policy.anchor_pool
        pool = spread(oldest, size, self._block_of, lambda block: self._most(block, size))
        pool.sort(key=lambda peer: key.xor_distance(self.peer_id_to_uid[peer]))
        return pool[: self._policy.anchors]

    def _forget(self) -> None:
        """Of the peers that are no longer in the table, those met last."""
        oldest = sorted(self.met.items(), key=lambda item: (item[0] not in self.peer_id_to_uid, item[1]))
        self.met = dict(oldest[: self._policy.max_met])

    def _most(self, block: str, places: int) -> float:
        return places * (self._policy.bucket_block_share if is_public_block(block) else 1.0)
