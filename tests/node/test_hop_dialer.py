"""A node dials what clients name only where the peer's own record says, a few at a time, and not again at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from virtual_clock import virtual_time, wall_clock

from swarm.errors import NetworkError, PeerUnreachable
from swarm.net.security.identity import Identity, verify
from swarm.records import encode, to_snapshot
from swarm.testing.memory_network import MemoryNetwork
from swarm.types import LayerSpan, NodeProfile, NodeState, PeerId, Snapshot
from swarm_hop.serving.hop_dialer import DialPolicy, HopDialer
from swarm_hop.serving.session import PeerChannel
from swarm_node.membership.address_book import AddressBook, AddressBookPolicy

TIMEOUT_S = 3.0
POLICY = DialPolicy()


@dataclass
class Dials:
    """Links that take as long as told; peers named "dead..." are never reached."""

    takes_s: float = 0.0
    live: set[PeerId] = field(default_factory=set)
    dialed: list[tuple[PeerId, Sequence[str]]] = field(default_factory=list)
    under_way: Counter[PeerId] = field(default_factory=Counter)
    most_at_once: int = 0  # peers

    def has_dialled(self, peer: PeerId) -> bool:
        return peer in self.live

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> PeerChannel:
        if peer in self.live:
            return peer  # type: ignore[return-value]
        self.dialed.append((peer, addresses))
        self.under_way[peer] += 1
        self.most_at_once = max(len(+self.under_way), self.most_at_once)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.under_way[peer] -= 1
        if peer.startswith("dead"):
            raise PeerUnreachable("nobody is there")
        self.live.add(peer)
        return peer  # type: ignore[return-value]


async def recorded(peer: PeerId) -> Sequence[str] | None:
    return None if peer.startswith("unknown") else (f"/memory/{peer}",)


async def refused(dialer: HopDialer, client: PeerId, peer: PeerId, why: str) -> None:
    with pytest.raises(PeerUnreachable, match=why):
        await dialer.get(client, peer)


@virtual_time
async def test_only_the_addresses_of_the_record_are_dialed() -> None:
    dials = Dials()
    dialer = HopDialer(dials, recorded, TIMEOUT_S)
    assert await dialer.get("client", "node") == "node"  # type: ignore[comparison-overlap]
    await refused(dialer, "client", "unknown", "no record")
    assert dials.dialed == [("node", ("/memory/node",))]
    assert await dialer.get("client", "node") == "node"  # type: ignore[comparison-overlap]
    assert len(dials.dialed) == 1


@virtual_time
async def test_a_peer_that_failed_is_not_dialed_again_at_once() -> None:
    dials = Dials()
    dialer = HopDialer(dials, recorded, TIMEOUT_S)
    waits = []
    for _ in range(6):
        await refused(dialer, f"client {len(waits)}", "dead", "nobody is there")
        started = asyncio.get_running_loop().time()
        while True:
            before = len(dials.dialed)
            with pytest.raises(PeerUnreachable):
                await dialer.get(f"client {len(waits)}", "dead")
            if len(dials.dialed) > before:
                break
            await asyncio.sleep(0.25)
        waits.append(asyncio.get_running_loop().time() - started)
        await asyncio.sleep(POLICY.max_backoff_s)
    assert waits == [1.0, 4.0, 16.0, 16.0, 16.0, 16.0]


@virtual_time
async def test_a_client_that_names_dead_peers_is_refused_and_another_is_not() -> None:
    dials = Dials(takes_s=0.1)
    dialer = HopDialer(dials, recorded, TIMEOUT_S)
    for number in range(200):
        with pytest.raises(PeerUnreachable):
            await dialer.get("hostile", f"dead {number}")
    assert len(dials.dialed) <= POLICY.failure_burst + 2
    await refused(dialer, "hostile", "dead again", "too many peers")
    assert await dialer.get("honest", "node") == "node"  # type: ignore[comparison-overlap]


@virtual_time
async def test_dials_under_way_are_bounded_per_client_and_in_all_and_shared() -> None:
    dials = Dials(takes_s=1.0)
    dialer = HopDialer(dials, recorded, TIMEOUT_S)
    async with asyncio.TaskGroup() as group:
        shared = [group.create_task(dialer.get("client", "node")) for _ in range(16)]
        await asyncio.sleep(0.1)
        for number in range(POLICY.max_dials_per_client - 1):
            group.create_task(dialer.get("client", f"node {number}"))
        await asyncio.sleep(0.1)
        await refused(dialer, "client", "node x", "under way")
        for client in range(8):
            for number in range(POLICY.max_dials_per_client):
                work = dialer.get(f"hostile {client}", f"node {client} {number}")
                group.create_task(_either(work))
        await asyncio.sleep(0.1)
    assert dials.most_at_once == POLICY.max_dials
    assert {task.result() for task in shared} == {"node"}
    assert sum(1 for peer, _ in dials.dialed if peer == "node") == len(shared), "the pool makes one dial of them"


async def _either(work: object) -> None:
    try:
        await work  # type: ignore[misc]
    except PeerUnreachable:
        return


@virtual_time
async def test_a_lookup_that_hangs_ends_in_time() -> None:
    async def hangs(peer: PeerId) -> Sequence[str] | None:
        await asyncio.sleep(3600)
        return ()

    started = asyncio.get_running_loop().time()
    await refused(HopDialer(Dials(), hangs, TIMEOUT_S), "client", "node", "within 3 s")
    assert asyncio.get_running_loop().time() - started == TIMEOUT_S


# The address book -----------------------------------------------------------------------------------------------------


def record(identity: Identity, addresses: tuple[str, ...]) -> bytes:
    profile = NodeProfile(
        identity.peer, "", NodeState.SERVING, "fp32", "hash", 4, LayerSpan(0, 4), addresses, published_at=wall_clock()
    )
    return encode(profile, "toy", 4, 12.0, identity.sign)[0]


@virtual_time
async def test_addresses_come_from_records_that_their_own_peer_has_signed() -> None:
    network = MemoryNetwork(clock=wall_clock)
    node, victim = Identity.generate(), Identity.generate()
    expiry = wall_clock() + 12.0
    network.store(node.peer, "toy", record(node, ("/memory/node",)), expiry)
    forged = record(Identity.generate(), ("/ip4/192.0.2.7/tcp/22",))  # in another's name
    network.store(victim.peer, "toy", forged, expiry)
    reads = 0

    async def snapshot() -> Snapshot:
        nonlocal reads
        reads += 1
        return to_snapshot(await network.directory("us").read("toy"), "toy", wall_clock(), verify, 4)

    book = AddressBook(snapshot)
    assert await book.of(node.peer) == ("/memory/node",)
    for number in range(100):
        assert await book.of(victim.peer) is None
        assert await book.of(f"unknown {number}") is None
    assert reads == 1, "naming unknown peers does not have the directory read each time"
    await asyncio.sleep(1.5)
    late = Identity.generate()
    network.store(late.peer, "toy", record(late, ("/memory/late",)), wall_clock() + 12.0)
    assert await book.of(late.peer) == ("/memory/late",), "a node that has just come"
    network.store(node.peer, "toy", record(node, ("/memory/moved",)), wall_clock() + 12.0)
    await asyncio.sleep(AddressBookPolicy().max_age_s + 0.1)
    assert await book.of(node.peer) == ("/memory/moved",)


@virtual_time
async def test_what_is_known_outlives_a_directory_that_fails() -> None:
    profile = NodeProfile("node", "", NodeState.SERVING, "fp32", "hash", 4, LayerSpan(0, 4), ("/memory/node",))
    working = True

    async def snapshot() -> Snapshot:
        if not working:
            raise NetworkError("it cannot be read")
        return Snapshot("toy", 4, (replace(profile),), 0.0, {})

    book = AddressBook(snapshot)
    assert await book.of("node") == ("/memory/node",)
    working = False
    await asyncio.sleep(60)
    assert await book.of("node") == ("/memory/node",)
    assert await book.of("another") is None
