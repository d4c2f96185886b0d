"""Attacks on the map by way of the DHT: who is seen by its readers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from hostile import Siege

from swarm import records
from swarm.net.dht import entries
from swarm.net.dht.directory import DhtDirectory
from swarm.net.dht.protocol import CheckedDHTProtocol
from swarm.net.libp2p import go_daemon
from swarm.net.libp2p._hivemind import DHTID, P2PContext, PeerID, dht_pb2, use_protocol
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.types import CostCurve, LayerSpan, NodeProfile, NodeState

Run = Callable[[], Awaitable[None]]
SYBILS = 160  # DHT ids that one host claims
HOSTS = 10  # more than the replicas of a record, and than the peers that a lookup visits
FEW_HOSTS = 3
CANDIDATES = 4000  # identities, of which the nearest to the key are used
SMALL_RECORDS = 10_000
BLACK_HOLES = 1000
LIFETIME_S = 50.0
REPLY_ENTRIES = 1000


async def key_takeover(siege: Siege) -> Run:
    """One host that claims 160 DHT ids next to the model's key: it takes every record, and returns none."""
    key = DHTID.generate(source=records.key(siege.target.model))
    near = _hostile_protocol(siege, list)
    directory = await _join(siege, client=False)
    peer = directory._node.p2p.peer_id
    near += [(DHTID(int(key) ^ (siege.rng.getrandbits(40) + 1)), peer) for _ in range(SYBILS)]
    return lambda: _announce(siege, directory, near)


async def key_takeover_hosts(siege: Siege) -> Run:
    """Ten hosts whose peer ids were chosen so that their places in the DHT are the nearest to the model's key."""
    return await _near_hosts(siege, HOSTS, list)


async def small_records(siege: Siege) -> Run:
    """Hosts next to the model's key that answer with 10,000 entries of a few bytes, each signed by its own peer."""
    key = DHTID.generate(source=records.key(siege.target.model)).to_bytes()
    made = [
        entries.pack(entries.sign(Identity.generate(), key, b"x", time.time() + LIFETIME_S))
        for _ in range(SMALL_RECORDS)
    ]
    return await _near_hosts(siege, FEW_HOSTS, lambda: siege.rng.sample(made, REPLY_ENTRIES))


async def black_hole_records(siege: Siege) -> Run:
    """Hosts next to the model's key that answer with 1,000 valid records of nodes that serve every layer at once and
    do not exist."""
    made = await perfect_records(siege, BLACK_HOLES)
    key = DHTID.generate(source=records.key(siege.target.model)).to_bytes()
    packed = [entries.pack(entries.sign(who, key, record, time.time() + LIFETIME_S)) for who, record in made]
    return await _near_hosts(siege, FEW_HOSTS, lambda: packed[:REPLY_ENTRIES])


async def store_flood(siege: Siege) -> Run:
    """Stores under the model's key and under others, as fast as they are answered: some signed, some not."""
    identity = Identity.generate()
    directory = await _join(siege, identity)
    protocol = directory._node.protocol

    async def one(peer: PeerID) -> None:
        while siege.running:
            key = siege.rng.randbytes(20)
            entry = entries.sign(identity, key, siege.rng.randbytes(1800), time.time() + LIFETIME_S)
            if siege.rng.random() < 0.5:
                entry = entry._replace(value=siege.rng.randbytes(1900))
            stored = await protocol.call_store(peer, [(DHTID.from_bytes(key), entry)] * 4)
            siege.counts["stored" if stored and any(stored) else "not stored"] += 1
            await asyncio.sleep(0.001)

    return lambda: siege.all_of(one(peer) for peer in _everybody(siege) for _ in range(8))


# Hosts in the DHT -----------------------------------------------------------------------------------------------------


async def _near_hosts(siege: Siege, hosts: int, answer: Callable[[], Sequence[bytes]]) -> Run:
    """`answer()`: the packed entries of one reply."""
    key = DHTID.generate(source=records.key(siege.target.model))
    made = sorted(
        (Identity.generate() for _ in range(CANDIDATES)),
        key=lambda one: key.xor_distance(DHTID.generate(source=one.peer)),
    )
    near = _hostile_protocol(siege, answer)
    directories = [await _join(siege, identity, client=False) for identity in made[:hosts]]
    near += [(DHTID.generate(source=d._transport.peer), d._node.p2p.peer_id) for d in directories]
    return lambda: siege.all_of(_announce(siege, directory, near) for directory in directories)


def _hostile_protocol(siege: Siege, answer: Callable[[], Sequence[bytes]]) -> list[tuple[DHTID, PeerID]]:
    """While it attacks, DHT nodes of this process say that they store what they are given, find what `answer` gives,
    and know nobody but the (id, peer) of the list that this returns."""
    near: list[tuple[DHTID, PeerID]] = []

    class HostileProtocol(CheckedDHTProtocol):
        async def rpc_store(self, request: Any, context: Any) -> Any:
            if not siege.running:
                return await super().rpc_store(request, context)
            siege.counts["stores swallowed"] += 1
            return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.node_info)

        async def rpc_find(self, request: Any, context: Any) -> Any:
            if not siege.running:
                return await super().rpc_find(request, context)
            siege.counts["finds answered"] += 1
            some = siege.rng.sample(near, min(20, len(near)))
            found = answer()
            result = dht_pb2.FindResult(
                type=dht_pb2.FOUND_DICTIONARY if found else dht_pb2.NOT_FOUND,
                value=b"".join(found),
                expiration_time=time.time() + LIFETIME_S if found else 0.0,
                nearest_node_ids=[node_id.to_bytes() for node_id, _ in some],
                nearest_peer_ids=[peer.to_bytes() for _, peer in some],
            )
            return dht_pb2.FindResponse(results=[result] * len(request.keys), peer=self.node_info)

    for name, asked, answered in (
        ("rpc_store", dht_pb2.StoreRequest, dht_pb2.StoreResponse),
        ("rpc_find", dht_pb2.FindRequest, dht_pb2.FindResponse),
    ):  # hivemind decodes by these
        getattr(HostileProtocol, name).__annotations__ = {"request": asked, "context": P2PContext, "return": answered}
    HostileProtocol.__name__ = CheckedDHTProtocol.__name__  # part of the name of each call
    HostileProtocol._rpc_handlers = None  # or the inherited ones are taken
    use_protocol(HostileProtocol)
    return near


async def _announce(siege: Siege, directory: DhtDirectory, near: Sequence[tuple[DHTID, PeerID]]) -> None:
    """Ping every node as each of the ids that are this host's, so that it puts them into its routing table."""
    protocol, own = directory._node.protocol, directory._node.p2p.peer_id

    async def ping(node_id: DHTID) -> None:
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


def _everybody(siege: Siege) -> list[PeerID]:
    return [PeerID.from_base58(node.peer) for node in siege.target.nodes]


# Records --------------------------------------------------------------------------------------------------------------


async def perfect_records(siege: Siege, count: int) -> list[tuple[Identity, bytes]]:
    """Of so many identities, none of which answers."""
    server = await asyncio.start_server(_tarpit, siege.target.own_address, 0)
    siege.stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    return [(who, perfect_record(siege, who, port)) for who in (Identity.generate() for _ in range(count))]


def perfect_record(siege: Siege, identity: Identity, port: int) -> bytes:
    """What the best node of the world would publish of itself."""
    target = siege.target
    profile = NodeProfile(
        peer=identity.peer,
        name="",
        state=NodeState.SERVING,
        dtype=target.dtype,
        weight_hash=target.weight_hash,
        layer_capacity=target.num_layers,
        span=LayerSpan(0, target.num_layers),
        addresses=(f"/ip4/{target.own_address}/tcp/{port}/tls/p2p/{identity.peer}",),
        layer_ms=(0.001,) * target.num_layers,
        cost=CostCurve((1, 64), (0.001, 0.002)),
        kv_capacity_tokens=1 << 20,
        kv_free_tokens=1 << 20,
        link_ms={node.peer: 0.01 for node in target.nodes},
        pinned=True,
        published_at=time.time(),
    )
    return records.encode(profile, target.model, target.num_layers, LIFETIME_S, identity.sign)[0]


async def _tarpit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes a connection, says nothing."""
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()
