"""hivemind's DHT protocol against untrusted peers: whose calls count, what is stored, and what a reply may hold.

Owns the handlers and calls of one DHT node. A peer has one place in the DHT, that of its peer id; it stores under that
id only, a few entries a second; a reply is read as far as it is well formed. Does not know the contents of the records,
nor who is asked for what (`lookup`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError

from swarm.errors import SwarmError
from swarm.net.base.tasks import TaskSet
from swarm.net.dht import entries
from swarm.net.dht.entries import Entry
from swarm.net.dht.entry_store import EntryStore
from swarm.net.dht.node_ids import claimed_id, dht_id, peer_of
from swarm.net.dht.peer_blocks import PeerBlocks
from swarm.net.dht.policy import RoutingTablePolicy
from swarm.net.dht.routing_table import BoundedRoutingTable
from swarm.net.dht.verification_budget import VerificationBudget
from swarm.net.libp2p._hivemind import (
    DHTID,
    HIVEMIND_CALL_ERRORS,
    DHTProtocol,
    P2PContext,
    PeerID,
    dht_pb2,
    get_dht_time,
    use_protocol,
)

logger = logging.getLogger(__name__)

MAX_KEYS = 4  # of one call
CALL_ERRORS = (*HIVEMIND_CALL_ERRORS, SwarmError, OSError, EOFError, TimeoutError, DecodeError, ValueError)
"""What a call raises when the peer does not answer, or not well."""

Found = dict[DHTID, tuple[list[Entry], dict[DHTID, PeerID]]]
"""By key: entries, whose signatures nobody has checked, and the peers that it knows nearest to the key."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a node's protocol shares with its directory. `DHTNode` passes it on as its record validator."""

    store: EntryStore
    budget: VerificationBudget
    blocks: PeerBlocks
    policy: RoutingTablePolicy


class CheckedDHTProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind is untyped
    """Made by `DHTNode.create(record_validator=NodeParts(...))`."""

    @classmethod
    async def create(
        cls,
        p2p: Any,
        node_id: DHTID,
        bucket_size: int,
        depth_modulo: int,
        num_replicas: int,
        wait_timeout: float,
        parallel_rpc: int | None,
        cache_size: int | None,
        client_mode: bool,
        record_validator: NodeParts,
        authorizer: None,
    ) -> CheckedDHTProtocol:
        self = cls(_initialized_with_create=True)
        parts = record_validator
        clock = asyncio.get_running_loop().time
        self.p2p, self.node_id = p2p, node_id
        self.bucket_size, self.num_replicas = parts.policy.bucket_size, num_replicas
        self.wait_timeout, self.client_mode = wait_timeout, client_mode
        self.rpc_semaphore = asyncio.Semaphore(parallel_rpc or 1024)
        self.authorizer = self.record_validator = None
        self.parts = parts
        self.routing_table = BoundedRoutingTable(
            node_id, parts.policy, clock, lambda peer: parts.blocks.of(peer.to_base58())
        )
        self.tasks = TaskSet("dht protocol")
        if client_mode:
            self.node_info = dht_pb2.NodeInfo()  # peers do not add us to their routing tables
        else:
            self.node_info = dht_pb2.NodeInfo(node_id=node_id.to_bytes())
            await self.add_p2p_handlers(p2p)
        return self

    async def shutdown(self) -> None:
        await super().shutdown()
        await self.tasks.close()

    # What others ask.

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """A peer wants to be in our routing table, and with `validate` to know whether we reach it."""
        response = dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time(), available=False)
        if claimed_id(request.peer.node_id, context.remote_id) is not None:
            if request.validate:
                response.available = await self.call_ping(context.remote_id) is not None
            else:
                await self._meet(request.peer, context.remote_id)
        return response

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Who asks for very much only hears who may know."""
        await self._meet(request.peer, context.remote_id)
        asking, asker = dht_id(context.remote_id), context.remote_id.to_base58()
        response = dht_pb2.FindResponse(results=[], peer=self.node_info)
        for key in islice(request.keys, MAX_KEYS):
            held = self.parts.store.reply(key)
            if held is None or not self.parts.budget.take_reply(asker, len(held[0])):
                result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            else:
                result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=held[0], expiration_time=held[1])
            for node_id, peer in self.routing_table.get_nearest_neighbors(
                DHTID.from_bytes(key), self.bucket_size, exclude=asking
            ):
                result.nearest_node_ids.append(node_id.to_bytes())
                result.nearest_peer_ids.append(peer.to_bytes())
            response.results.append(result)
        return response

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """A peer wants us to keep its own entries; those of others come by our own lookups, if at all."""
        await self._meet(request.peer, context.remote_id)
        response = dht_pb2.StoreResponse(store_ok=[], peer=self.node_info)
        peer = context.remote_id.to_base58()
        wanted = zip(request.keys, request.values, request.expiration_time, strict=False)
        for key, value, expires_at in islice(wanted, MAX_KEYS):
            response.store_ok.append(self._keep(key, Entry(peer, value, expires_at)))
        return response

    def _keep(self, key: bytes, entry: Entry) -> bool:
        parts = self.parts
        return (
            len(key) == DHTID.HASH_NBYTES
            and entries.is_plausible(entry, get_dht_time())
            and entry.expires_at > parts.store.expires_at(key, entry.peer)
            and parts.budget.take_store(entry.peer)
            and entries.is_signed(key, entry)
            and parts.store.put(key, entry)
        )

    # What we ask.

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        claimed = await super().call_ping(peer, validate, strict)
        return claimed if claimed == dht_id(peer) else None

    async def call_store(self, peer: PeerID, stored: Sequence[tuple[DHTID, Entry]]) -> list[bool] | None:
        """Whether `peer` keeps each of them; None if it did not answer."""
        request = dht_pb2.StoreRequest(
            keys=[key.to_bytes() for key, _ in stored],
            values=[entry.value for _, entry in stored],
            expiration_time=[entry.expires_at for _, entry in stored],
            peer=self.node_info,
        )
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_store(request, timeout=self.wait_timeout)
        except CALL_ERRORS as error:
            logger.debug("%s did not store: %r", peer, error)
            self.routing_table.did_not_answer(dht_id(peer))
            return None
        await self._meet(response.peer, peer)
        return [bool(ok) for ok in islice(response.store_ok, len(stored))]

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> Found | None:
        """None if `peer` did not answer, or not well."""
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
        except CALL_ERRORS as error:
            logger.debug("%s did not find: %r", peer, error)
            self.routing_table.did_not_answer(dht_id(peer))
            return None
        await self._meet(response.peer, peer)
        if len(response.results) != len(keys):
            return None
        return {
            key: (_values(result), self._nearest(result)) for key, result in zip(keys, response.results, strict=True)
        }

    def _nearest(self, result: dht_pb2.FindResult) -> dict[DHTID, PeerID]:
        """The peers that a reply names, each at its own place, whatever place the reply gives it."""
        peers = (peer_of(raw) for raw in islice(result.nearest_peer_ids, self.bucket_size))
        places = {dht_id(peer): peer for peer in peers if peer is not None}
        places.pop(self.node_id, None)
        return places

    # The routing table.

    async def _meet(self, info: dht_pb2.NodeInfo, peer: PeerID) -> None:
        """A peer that takes part in the DHT, not a client, has called or answered."""
        node_id = claimed_id(info.node_id, peer)
        if node_id is not None:
            await self.update_routing_table(node_id, peer)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Unlike hivemind's, sends a newcomer nothing: to be nearest to a key costs little, its entries are many, and
        their peers send them again within seconds.
        """
        derived = dht_id(peer_id)
        if not responded:
            self.routing_table.did_not_answer(derived)
        elif node_id == derived != self.node_id:
            if derived not in self.routing_table and not self.tasks.closed:
                self.tasks.start(self.parts.blocks.refresh_for(peer_id.to_base58()), "see where a peer is")
            to_ping = self.routing_table.add_or_update_node(derived, peer_id)
            if to_ping is not None and not self.tasks.closed:
                self.tasks.start(self.call_ping(to_ping[1]), "ping")


def _values(result: dht_pb2.FindResult) -> list[Entry]:
    return entries.unpack(result.value) if result.type == dht_pb2.FOUND_DICTIONARY else []


use_protocol(CheckedDHTProtocol)
