"""Attacks on the map: who is seen by readers of the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hostile import Siege

from swarm import records
from swarm.net.dht.directory import DhtDirectory
from swarm.net.libp2p import go_daemon
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.types import CostCurve, LayerSpan, NodeProfile, NodeState

Run = Callable[[], Awaitable[None]]
SYBILS = 160
SMALL_RECORDS = 10_000
BLACK_HOLES = 1000
BATCH = 100
CANDIDATES = 4000  # identities, of which the nearest to the key are used
LIFETIME_S = 30.0


async def _join(siege: Siege, identity: Identity | None = None, client: bool = True) -> DhtDirectory:
    peers = tuple(address for node in siege.target.nodes for address in node.addresses if "/tls/" not in address)
    listen = f"/ip4/{siege.target.own_address}/tcp/0"
    options = HostOptions(listen=(listen,), peers=peers[:8])
    go_daemon.POLICY = replace(go_daemon.POLICY, health_timeout_s=60.0)  # ours gets little of the processor
    transport = await Libp2pTransport.start(identity or Identity.generate(), options)
    siege.stack.push_async_callback(transport.close)
    directory = await DhtDirectory.start(transport, peers[:8], client=client)
    siege.stack.push_async_callback(directory.close)
    return directory


def _everybody(siege: Siege) -> list[Any]:
    from swarm.net.libp2p._hivemind import PeerID

    return [PeerID.from_base58(node.peer) for node in siege.target.nodes]


# Takeover of the key --------------------------------------------------------------------------------------------------


async def key_takeover(siege: Siege) -> Run:
    """One host with 160 DHT ids next to the model's key: it takes every record, and returns none."""
    return await _takeover(siege, hosts=1)


async def key_takeover_hosts(siege: Siege) -> Run:
    """Four hosts whose DHT ids follow from their peer ids, which were chosen for being next to the model's key."""
    return await _takeover(siege, hosts=4)


async def _takeover(siege: Siege, hosts: int) -> Run:
    from swarm.net.libp2p._hivemind import DHTID

    key = DHTID.generate(source=records.key(siege.target.model))
    near = _swallow(siege, key)
    made = [Identity.generate() for _ in range(CANDIDATES if hosts > 1 else 1)]
    made.sort(key=lambda one: key.xor_distance(DHTID.generate(source=one.peer)))
    directories = [await _join(siege, identity, client=False) for identity in made[:hosts]]
    for directory in directories:
        own = DHTID.generate(source=directory._transport.peer)
        ids = [DHTID(int(key) ^ (siege.rng.getrandbits(40) + 1)) for _ in range(SYBILS)] if hosts == 1 else [own]
        near += [(node_id, directory._node.p2p.peer_id) for node_id in ids]

    async def announce(directory: DhtDirectory) -> None:
        """Ping every node as each of our ids, so that it puts them into its routing table."""
        from hivemind.proto import dht_pb2

        protocol, own = directory._node.protocol, directory._node.p2p.peer_id

        async def ping(node_id: Any) -> None:
            request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id.to_bytes()), validate=False)
            pings = [protocol.get_stub(peer).rpc_ping(request, timeout=3) for peer in _everybody(siege)]
            for result in await asyncio.gather(*pings, return_exceptions=True):
                siege.counts["failed pings" if isinstance(result, BaseException) else "pings"] += 1

        mine = [node_id for node_id, peer in near if peer == own]
        while siege.running:
            for start in range(0, len(mine), 10):
                if siege.running:
                    await asyncio.gather(*(ping(node_id) for node_id in mine[start : start + 10]))
            await asyncio.sleep(0.5)

    return lambda: siege.all_of(announce(directory) for directory in directories)


def _swallow(siege: Siege, key: Any) -> list[tuple[Any, Any]]:
    """From now on, DHT nodes of this process say that they store what they are given, find nothing, and know nobody
    but the (id, peer) of the list that this returns."""
    import hivemind.dht.node
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.proto import dht_pb2

    from swarm.net.libp2p._hivemind import P2PContext

    near: list[tuple[Any, Any]] = []

    class Swallowing(DHTProtocol):  # type: ignore[misc]
        async def rpc_store(self, request: Any, context: Any) -> Any:
            siege.counts["stores swallowed"] += 1
            return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.node_info)

        async def rpc_find(self, request: Any, context: Any) -> Any:
            siege.counts["finds answered"] += 1
            some = siege.rng.sample(near, min(20, len(near)))
            empty = dht_pb2.FindResult(
                type=dht_pb2.NOT_FOUND,
                nearest_node_ids=[node_id.to_bytes() for node_id, _ in some],
                nearest_peer_ids=[peer.to_bytes() for _, peer in some],
            )
            return dht_pb2.FindResponse(results=[empty] * len(request.keys), peer=self.node_info)

    for name, asked, answered in (
        ("rpc_store", dht_pb2.StoreRequest, dht_pb2.StoreResponse),
        ("rpc_find", dht_pb2.FindRequest, dht_pb2.FindResponse),
    ):  # hivemind decodes by these
        getattr(Swallowing, name).__annotations__ = {"request": asked, "context": P2PContext, "return": answered}
    Swallowing.__name__ = DHTProtocol.__name__  # part of the name of each call
    hivemind.dht.node.DHTProtocol = Swallowing
    return near


# Records in bulk ------------------------------------------------------------------------------------------------------


async def small_records(siege: Siege) -> Run:
    """10,000 entries of a few bytes under the model's key, each signed by an identity of its own."""
    identities = [Identity.generate() for _ in range(SMALL_RECORDS)]  # before: it takes seconds
    directory = await _join(siege)
    return lambda: _store_rounds(siege, directory, lambda: ((identity, b"x") for identity in identities))


async def black_hole_records(siege: Siege) -> Run:
    """1,000 valid records a round, each of a node that serves every layer at once and does not exist."""
    identities = [Identity.generate() for _ in range(BLACK_HOLES)]
    directory = await _join(siege)
    own = siege.target.own_address
    server = await asyncio.start_server(_tarpit, own, 0)
    siege.stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]

    def made() -> Iterable[tuple[Identity, bytes]]:
        for identity in identities:
            profile = perfect(siege, identity, (f"/ip4/{own}/tcp/{port}/tls/p2p/{identity.peer}",))
            yield (
                identity,
                records.encode(profile, siege.target.model, siege.target.num_layers, LIFETIME_S, identity.sign)[0],
            )

    return lambda: _store_rounds(siege, directory, made)


def perfect(siege: Siege, identity: Identity, addresses: Sequence[str]) -> NodeProfile:
    """What the best node of the world would publish of itself."""
    target = siege.target
    return NodeProfile(
        peer=identity.peer,
        name="",
        state=NodeState.SERVING,
        dtype=target.dtype,
        weight_hash=target.weight_hash,
        layer_capacity=target.num_layers,
        span=LayerSpan(0, target.num_layers),
        addresses=tuple(addresses),
        layer_ms=(0.001,) * target.num_layers,
        cost=CostCurve((1, 64), (0.001, 0.002)),
        kv_capacity_tokens=1 << 20,
        kv_free_tokens=1 << 20,
        link_ms={node.peer: 0.01 for node in target.nodes},
        pinned=True,
        published_at=time.time(),
    )


async def _tarpit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes a connection, says nothing."""
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()


async def _store_rounds(
    siege: Siege, directory: DhtDirectory, made: Callable[[], Iterable[tuple[Identity, bytes]]]
) -> None:
    """Give all that `made` makes to every node, in batches, again and again."""
    from swarm.net.dht.validation import _signed
    from swarm.net.libp2p._hivemind import DHTID, DHTRecord, MSGPackSerializer

    key = DHTID.generate(source=records.key(siege.target.model))
    protocol = directory._node.protocol
    while siege.running:
        batch: list[tuple[str, bytes, float]] = []
        for identity, value in made():
            expires = time.time() + LIFETIME_S
            packed = MSGPackSerializer.dumps(value)
            record = DHTRecord(key.to_bytes(), MSGPackSerializer.dumps(identity.peer), packed, expires)
            batch.append((identity.peer, packed + identity.sign(_signed(record, packed)), expires))
            if len(batch) >= BATCH:
                await _store(siege, protocol, key, batch)
                batch = []
            if not siege.running:
                return
        await _store(siege, protocol, key, batch)
        siege.counts["rounds"] += 1
        await asyncio.sleep(0.2)


async def _store(siege: Siege, protocol: Any, key: Any, batch: Sequence[tuple[str, bytes, float]]) -> None:
    if not batch:
        return
    peers, values, expirations = (list(column) for column in zip(*batch, strict=True))
    calls = [
        protocol.call_store(peer, [key] * len(batch), values, expirations, subkeys=peers) for peer in _everybody(siege)
    ]
    for stored in await asyncio.gather(*calls, return_exceptions=True):
        siege.counts["stored" if isinstance(stored, list) and any(stored) else "not stored"] += len(batch)
