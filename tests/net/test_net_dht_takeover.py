"""Attempts to make a model's nodes invisible: identities in bulk near its key, free choice of places, black holes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from memory_dht import MemoryDht, Swallower

from swarm.net.dht.directory import DhtDirectory
from swarm.net.dht.node_ids import dht_id
from swarm.net.dht.policy import DhtPolicy, RoutingTablePolicy
from swarm.net.libp2p._hivemind import DHTID, PeerID
from swarm.net.security.identity import Identity
from swarm.records import key

KEY = DHTID.generate(source=key("m"))
HONEST = [Identity.from_seed(bytes([i]) * 32) for i in range(1, 13)]
ONLY_KADEMLIA = replace(DhtPolicy(), routing=replace(RoutingTablePolicy(), anchors=0))
"""As before: the peers nearest to the key, by what they say of each other."""


def identities_near(place: DHTID, count: int, tries: int = 3000) -> list[Identity]:
    """What an attacker finds within a second: the rule that a place follows from a peer id does not prevent it."""
    made = [Identity.from_seed(i.to_bytes(32, "big")) for i in range(1, tries)]
    made.sort(key=lambda identity: place.xor_distance(dht_id(PeerID.from_base58(identity.peer))))
    return made[:count]


class Siege:
    """Honest nodes that publish every round, and those who attack them."""

    def __init__(self, stack: AsyncExitStack, policy: DhtPolicy) -> None:
        self.dht = MemoryDht()
        self._stack = stack
        self._policy = policy
        self.honest: list[DhtDirectory] = []
        self.attackers: list[Swallower] = []

    async def start(self) -> None:
        for identity in HONEST:
            self.honest.append(await self.join(identity, HONEST[:1] if self.honest else ()))
        await self.publish()

    async def join(self, identity: Identity, by: Sequence[Identity], client: bool = False) -> DhtDirectory:
        directory = await self.dht.join(identity, by, client, self._policy)
        self._stack.push_async_callback(directory.close)
        return directory

    async def attack(self, identities: Sequence[Identity]) -> None:
        kind: list[PeerID] = []
        for identity in identities:
            attacker = Swallower(self.dht, identity, kind)
            kind.append(attacker.p2p.peer_id)
            self.attackers.append(attacker)
        victims = [directory._node.peer_id for directory in self.honest]
        await asyncio.gather(*(attacker.enter(victims) for attacker in self.attackers))

    async def publish(self) -> None:
        await asyncio.gather(*(directory.publish(b"here", "m", time.time() + 30) for directory in self.honest))

    async def seen_by(self, reader: DhtDirectory) -> set[str]:
        return set(await reader.read("m")) & {identity.peer for identity in HONEST}


EVERYONE = {identity.peer for identity in HONEST}


async def test_identities_in_bulk_near_the_key_hide_nobody() -> None:
    """160 hostile identities are the nearest to the key, in every routing table, and swallow what is stored there."""
    async with AsyncExitStack() as stack:
        siege = Siege(stack, DhtPolicy())
        await siege.start()
        assert await siege.seen_by(siege.honest[3]) == EVERYONE
        await siege.attack(identities_near(KEY, 160))
        table = siege.honest[5]._node.protocol.routing_table
        nearest = [peer for _, peer in table.get_nearest_neighbors(KEY, 8)]
        hostile = {attacker.p2p.peer_id for attacker in siege.attackers}
        assert len(set(nearest) & hostile) >= 6, "the attack is one"
        for _ in range(2):
            await siege.publish()
            for reader in siege.honest:
                assert await siege.seen_by(reader) == EVERYONE
        fresh = await siege.join(Identity.generate(), HONEST[4:5], client=True)
        assert await siege.seen_by(fresh) == EVERYONE
        newcomer = await siege.join(Identity.generate(), HONEST[7:8])
        await newcomer.publish(b"here", "m", time.time() + 30)
        for _ in range(10):  # of nodes that read, as each does every second or two
            seen = [newcomer._transport.peer in await reader.read("m") for reader in (fresh, *siege.honest)]
            if all(seen):
                break
        assert all(seen), f"a node that joins during the attack is seen by {sum(seen)} of {len(seen)}"


async def test_the_same_attack_on_kademlia_alone() -> None:
    """Nothing but the longest-known peers saves them: without them it hides most of the nodes, if not in every try."""
    seen: list[int] = []
    while not seen or (min(seen) >= len(EVERYONE) / 2 and len(seen) < 5):
        async with AsyncExitStack() as stack:
            siege = Siege(stack, ONLY_KADEMLIA)
            await siege.start()
            await siege.attack(identities_near(KEY, 160))
            await siege.publish()
            fresh = await siege.join(Identity.generate(), HONEST[4:5], client=True)
            seen.append(len(await siege.seen_by(fresh)))
    assert min(seen) < len(EVERYONE) / 2, f"nodes seen in each try, of {len(EVERYONE)}: {seen}"


async def test_black_holes_near_the_key_hold_up_a_reader_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        siege = Siege(stack, replace(DhtPolicy(), patience_s=0.5, wait_timeout_s=1.0))
        await siege.start()
        await siege.attack(identities_near(KEY, 40))
        for attacker in siege.attackers:
            attacker.stall = True
        clock = asyncio.get_running_loop().time
        started = clock()
        await siege.honest[3].publish(b"here", "m", time.time() + 40)
        assert await siege.seen_by(siege.honest[6]) == EVERYONE
        assert clock() - started < 4 * 0.5 + 3.0, "three waits of `patience_s`, and what a busy machine takes"


async def test_a_peer_that_claims_another_place_is_in_no_table_and_stores_nothing() -> None:
    """What 160 free identities were: places chosen next to the key."""
    async with AsyncExitStack() as stack:
        siege = Siege(stack, DhtPolicy())
        await siege.start()
        kind: list[PeerID] = []
        liars = []
        for number in range(1, 30):
            liar = Swallower(siege.dht, Identity.generate(), kind, DHTID(KEY ^ number))
            kind.append(liar.p2p.peer_id)
            liars.append(liar)
        victims = [directory._node.peer_id for directory in siege.honest]
        for liar in liars:
            await liar.enter(victims)
        for directory in siege.honest:
            protocol = directory._node.protocol
            assert await protocol.call_ping(kind[0]) is None
            await protocol.call_find(kind[1], [KEY])
            assert not set(protocol.routing_table.peer_id_to_uid) & set(kind)
        siege.dht.calls.clear()
        await siege.publish()
        assert not set(siege.dht.calls) & set(kind)
        assert await siege.seen_by(siege.honest[0]) == EVERYONE


async def test_a_reply_gives_peers_no_other_place_than_their_own() -> None:
    async with AsyncExitStack() as stack:
        siege = Siege(stack, DhtPolicy())
        await siege.start()
        attacker = Swallower(siege.dht, Identity.generate(), [])
        far = PeerID.from_base58(Identity.generate().peer)

        async def find(request: object, context: object) -> object:
            response = await attacker.find(request, context)
            for raw in (far.to_bytes(), b"rubbish", b"", attacker.p2p.peer_id.to_bytes()):
                response.results[0].nearest_node_ids.append(KEY.to_bytes())
                response.results[0].nearest_peer_ids.append(raw)
            return response

        attacker.p2p.handlers["rpc_find"] = find, attacker.p2p.handlers["rpc_find"][1]
        found = await siege.honest[0]._node.protocol.call_find(attacker.p2p.peer_id, [KEY])
        assert found is not None
        assert found[KEY] == ([], {dht_id(far): far, dht_id(attacker.p2p.peer_id): attacker.p2p.peer_id})
