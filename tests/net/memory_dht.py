"""hivemind's remote calls within one process, so that a DHT of hundreds of nodes needs neither daemons nor sockets.

Owns what `DhtDirectory` uses of a transport and of a `hivemind.P2P`. Messages are serialized as on the wire; the caller
that a handler sees is the true one, as the p2p daemon authenticates it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from swarm.net.dht.directory import DhtDirectory
from swarm.net.dht.node_ids import dht_id
from swarm.net.dht.policy import DhtPolicy
from swarm.net.libp2p._hivemind import DHTID, P2PContext, PeerID, dht_pb2
from swarm.net.security.identity import Identity

Handle = Callable[[Any, Any], Awaitable[Any]]


class MemoryP2P:
    """A stand-in for `hivemind.P2P`."""

    def __init__(self, network: MemoryDht, identity: Identity) -> None:
        self.peer_id = PeerID.from_base58(identity.peer)
        self._network = network
        self.handlers: dict[str, tuple[Handle, Any]] = {}

    async def add_protobuf_handler(self, name: str, handler: Handle, request: Any, **_: Any) -> None:
        self.handlers[name.rpartition(".")[2]] = handler, request

    async def remove_protobuf_handler(self, name: str, **_: Any) -> None:
        self.handlers.pop(name.rpartition(".")[2], None)

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Any, response: Any) -> Any:
        return await self._network.call(self.peer_id, peer, name.rpartition(".")[2], request, response)

    async def shutdown(self) -> None:
        self.handlers.clear()

    def _terminate(self) -> None:
        self.handlers.clear()


class MemoryDht:
    """All nodes. `calls` counts what each was asked. `ips`: where each is seen to be."""

    def __init__(self) -> None:
        self.nodes: dict[PeerID, MemoryP2P] = {}
        self.ips: dict[str, str] = {}
        self.calls: dict[PeerID, int] = {}

    def p2p(self, identity: Identity) -> MemoryP2P:
        node = MemoryP2P(self, identity)
        self.nodes[node.peer_id] = node
        return node

    async def call(self, caller: PeerID, peer: PeerID, name: str, request: Any, response: Any) -> Any:
        node = self.nodes.get(peer)
        if node is None or name not in node.handlers:
            raise ConnectionError(f"{peer} is not here")
        self.calls[peer] = self.calls.get(peer, 0) + 1
        handle, kind = node.handlers[name]
        await asyncio.sleep(0)
        context = P2PContext(handle_name=name, local_id=peer, remote_id=caller)
        answer = await handle(kind.FromString(request.SerializeToString()), context)
        return response.FromString(answer.SerializeToString())

    async def join(
        self, identity: Identity, by: Sequence[Identity] = (), client: bool = False, policy: DhtPolicy = DhtPolicy()
    ) -> DhtDirectory:
        peers = [f"/ip4/127.0.0.1/tcp/1/p2p/{member.peer}" for member in by]
        transport: Any = MemoryTransport(self, identity)
        return await DhtDirectory.start(transport, peers, client=client, policy=policy)


class MemoryTransport:
    """What the directory uses of a `Libp2pTransport`, its host and the host's control."""

    def __init__(self, network: MemoryDht, identity: Identity) -> None:
        self._network = network
        self.identity, self.peer = identity, identity.peer
        self.daemon = self.control = self

    async def hivemind_p2p(self) -> MemoryP2P:
        return self._network.p2p(self.identity)

    async def connected(self) -> dict[str, str]:
        return self._network.ips

    def on_down(self, callback: object) -> None: ...

    def on_up(self, callback: object) -> None: ...


class Swallower:
    """A hostile DHT node: enters every routing table, says that it stores, knows only its kind, and has no entries."""

    def __init__(self, network: MemoryDht, identity: Identity, kind: list[PeerID], claim: DHTID | None = None) -> None:
        self.p2p = network.p2p(identity)
        self.kind = kind
        place = claim if claim is not None else dht_id(self.p2p.peer_id)
        self.info = dht_pb2.NodeInfo(node_id=place.to_bytes())
        self.stall = False
        self.p2p.handlers.update(
            rpc_ping=(self.ping, dht_pb2.PingRequest),
            rpc_find=(self.find, dht_pb2.FindRequest),
            rpc_store=(self.store, dht_pb2.StoreRequest),
        )

    async def enter(self, victims: Sequence[PeerID]) -> None:
        for victim in victims:
            request = dht_pb2.PingRequest(peer=self.info)
            await self.p2p.call_protobuf_handler(victim, "rpc_ping", request, dht_pb2.PingResponse)

    async def ping(self, request: Any, context: P2PContext) -> Any:
        return dht_pb2.PingResponse(peer=self.info, available=True)

    async def store(self, request: Any, context: P2PContext) -> Any:
        await self._maybe_stall()
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.info)

    async def find(self, request: Any, context: P2PContext) -> Any:
        await self._maybe_stall()
        response = dht_pb2.FindResponse(peer=self.info)
        for key in request.keys:
            nearest = sorted(self.kind, key=lambda peer: DHTID.from_bytes(key).xor_distance(dht_id(peer)))[:20]
            response.results.append(
                dht_pb2.FindResult(
                    type=dht_pb2.NOT_FOUND,
                    nearest_node_ids=[dht_id(peer).to_bytes() for peer in nearest],
                    nearest_peer_ids=[peer.to_bytes() for peer in nearest],
                )
            )
        return response

    async def _maybe_stall(self) -> None:
        if self.stall:
            await asyncio.sleep(60)
