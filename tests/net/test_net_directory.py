"""The directory on real DHT nodes on 127.0.0.1, and attacks of untrusted peers on it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import msgpack
import pytest
from child_processes import children

from swarm.errors import ClockSkew, NetworkError, PeerUnreachable
from swarm.net.dht import entries
from swarm.net.dht.directory import DhtDirectory
from swarm.net.dht.entries import Entry
from swarm.net.dht.policy import EntryStorePolicy
from swarm.net.libp2p import go_daemon
from swarm.net.libp2p._hivemind import DHTID
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.records import MAX_LIFETIME_S, MAX_RECORD, key

pytestmark = pytest.mark.processes

Member = tuple[Libp2pTransport, DhtDirectory]


@contextlib.asynccontextmanager
async def swarm(size: int, clients: int = 0) -> AsyncIterator[list[Member]]:
    async with contextlib.AsyncExitStack() as stack:
        members: list[Member] = []
        for i in range(size + clients):
            peers = members[0][0].addresses if members else ()
            transport = await Libp2pTransport.start(Identity.generate(), HostOptions(peers=peers))
            stack.push_async_callback(transport.close)
            directory = await DhtDirectory.start(transport, peers, client=i >= size)
            stack.push_async_callback(directory.close)
            members.append((transport, directory))
        yield members
    assert not children()


async def test_three_nodes_and_a_client_see_the_same_records() -> None:
    async with swarm(3, clients=1) as members:
        soon = time.time() + 10
        for i, (_, directory) in enumerate(members[:3]):
            await directory.publish(b"record %d" % i, "m", soon)
        everyone = {transport.peer: b"record %d" % i for i, (transport, _) in enumerate(members[:3])}
        for _, directory in members:
            assert await directory.read("m") == everyone
        (transport, directory), (_, other), (_, client) = members[0], members[1], members[3]
        for round_ in range(3):  # a refresh replaces, even one with the same expiry
            await directory.publish(b"again %d" % round_, "m", soon)
            assert (await other.read("m"))[transport.peer] == b"again %d" % round_
        assert (await client.read("m"))[transport.peer] == b"again 2"
        assert len(await client.read("m")) == 3
        assert await client.read("another model") == {}


async def test_a_node_that_vanished_and_starts_again_is_one_replica_and_not_two() -> None:
    async with swarm(3) as members, contextlib.AsyncExitStack() as stack:
        transport, directory = members[2]
        await directory.publish(b"before", "m", time.time() + 10)
        identity = transport.identity
        await directory.close()  # without a word
        await transport.close()
        peers = members[0][0].addresses
        again = await Libp2pTransport.start(identity, HostOptions(peers=peers))
        stack.push_async_callback(again.close)
        directory = await DhtDirectory.start(again, peers)
        stack.push_async_callback(directory.close)
        for number in range(5):
            for _, other in (*members[:2], (again, directory)):
                await other.publish(b"%d" % number, "m", time.time() + 10)
        for _, other in members[:2]:
            table = other._node.protocol.routing_table
            assert [str(peer) for peer in table.uid_to_peer_id.values()].count(again.peer) == 1
            assert (await other.read("m"))[again.peer] == b"4"


async def test_a_replica_that_refuses_does_not_fail_a_store_that_others_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(3) as members:
        (_, publisher), (_, second), (_, third) = members
        monkeypatch.setattr(third._held, "put", lambda *args: False)
        for number in range(5):
            await publisher.publish(b"%d" % number, "m", time.time() + 10)
            assert list((await second.read("m")).values()) == [b"%d" % number]
            assert await third.read("m") == {}
        for directory in (publisher, second):
            monkeypatch.setattr(directory._held, "put", lambda *args: False)
        with pytest.raises(NetworkError, match="no peer stored our record"):
            await publisher.publish(b"5", "m", time.time() + 10)


async def test_records_expire_and_their_lifetime_is_capped() -> None:
    async with swarm(2) as ((_, one), (_, two)):
        await one.publish(b"short", "m", time.time() + 0.5)
        assert list((await two.read("m")).values()) == [b"short"]
        await asyncio.sleep(0.6)
        assert await two.read("m") == {}
        await one.publish(b"long", "m", time.time() + 1e9)
        assert list((await two.read("m")).values()) == [b"long"]
        assert two._held.entries(key_of("m").to_bytes())[0].expires_at <= time.time() + MAX_LIFETIME_S
        with pytest.raises(NetworkError, match="limit"):
            await one.publish(bytes(3000), "m", time.time() + 5)


def key_of(model: str) -> DHTID:
    return DHTID.generate(source=key(model))


async def test_untrusted_peers_cannot_write_under_another_peers_id() -> None:
    """Nor store what that peer has signed for another key or until another time, nor anything that is no entry."""
    async with swarm(3) as ((victim, one), (_, two), (attacker, lair)):
        await one.publish(b"truth", "m", time.time() + 10)
        await lair.publish(b"attacker", "m", time.time() + 10)
        honest = {victim.peer: b"truth", attacker.peer: b"attacker"}
        key_id = key_of("m")
        held = {entry.peer: entry for entry in two._held.entries(key_id.to_bytes())}
        truth = held[victim.peer]
        later, raw = time.time() + 20, key_id.to_bytes()
        mine = attacker.identity
        assert (await lair._node.protocol.call_store(two._node.peer_id, [(key_id, truth)])) == [False]
        for planted in (
            Entry(attacker.peer, b"forged" + bytes(64), later),
            Entry(attacker.peer, truth.value, later),
            Entry(attacker.peer, truth.value, truth.expires_at),
            entries.sign(mine, raw, b"immortal", time.time() + 1e6),
            entries.sign(mine, raw, b"long gone", time.time() - 1),
            entries.sign(mine, raw, bytes(5000), later),
            entries.sign(mine, raw, b"not a number", float("nan")),
            entries.sign(mine, key_of("another").to_bytes(), b"of another key", later),
            Entry(attacker.peer, b"", later),
        ):
            for directory in (one, two):
                stored = await lair._node.protocol.call_store(directory._node.peer_id, [(key_id, planted)])
                assert stored == [False], planted
        for directory in (one, two):
            assert await directory.read("m") == honest
        assert two._held.expires_at(raw, victim.peer) == truth.expires_at


async def test_a_malicious_replica_costs_nobody_an_entry() -> None:
    """Its honest entries are read up to the first that nobody signed."""
    async with swarm(3) as ((victim, one), (_, two), (attacker, lair)):
        await one.publish(b"truth", "m", time.time() + 10)
        raw, soon = key_of("m").to_bytes(), time.time() + 10
        replies = [
            entries.sign(attacker.identity, raw, b"mine", soon),
            Entry("rubbish", b"x" * 100, soon),
            Entry(victim.peer, b"forged" + bytes(64), soon + 20),
            Entry(victim.peer, b"immortal" + bytes(64), float("inf")),
        ]
        packed = b"".join(map(entries.pack, replies))
        lair._node.protocol.parts.store.reply = lambda key, most=0: (packed + b"\xff rubbish", soon)
        assert await two.read("m") == {victim.peer: b"truth", attacker.peer: b"mine"}
        packed = bytes(1 << 20)
        assert (await one.read("m"))[victim.peer] == b"truth"
        lair._node.protocol.parts.store.reply = lambda key, most=0: 1 / 0
        assert (await one.read("m"))[victim.peer] == b"truth"


async def test_more_entries_than_a_reader_reads_hide_nobody() -> None:
    """A reply over the bound was once rejected whole, so that 4,200 small entries made a client read nothing."""
    async with swarm(3, clients=1) as members:
        for i, (_, directory) in enumerate(members[:2]):
            await directory.publish(b"%d" % i, "m", time.time() + 20)
        lair, client = members[2][1], members[3][1]
        raw, soon = key_of("m").to_bytes(), time.time() + 20
        crowd = [Identity.from_seed(i.to_bytes(32, "big")) for i in range(4200)]
        packed = b"".join(entries.pack(entries.sign(identity, raw, b"hostile", soon)) for identity in crowd)
        lair._node.protocol.parts.store.reply = lambda key, most=0: (packed, soon)
        records = await client.read("m")
        assert {members[0][0].peer, members[1][0].peer} <= set(records)
        assert len(records) > 100  # and room is used while there is some
        assert len(records) <= EntryStorePolicy().max_entries * EntryStorePolicy().slack


async def test_joining_by_way_of_peers_without_a_directory() -> None:
    bare = await Libp2pTransport.start(Identity.generate())
    joiner = await Libp2pTransport.start(Identity.generate(), HostOptions(peers=bare.addresses))
    with pytest.raises(PeerUnreachable, match="directory"):
        await DhtDirectory.start(joiner, bare.addresses)
    await joiner.close()
    await bare.close()


async def test_a_dead_daemon_is_an_error_and_not_an_empty_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go_daemon, "POLICY", replace(go_daemon.POLICY, restart_backoff_s=()))
    async with swarm(1) as ((transport, directory),):
        await directory.publish(b"x", "m", time.time() + 10)
        os.kill(transport.daemon_pid, signal.SIGKILL)
        await transport.failed.wait()
        for doomed in (directory.read("m"), directory.publish(b"x", "m", time.time() + 10)):
            with pytest.raises(NetworkError):
                await doomed


async def test_after_the_death_of_its_daemon_a_node_is_found_again() -> None:
    async with swarm(3) as ((first, directory), (_, second), (third, _)):
        soon = time.time() + 30
        await second.publish(b"second", "m", soon)
        restarted: asyncio.Queue[None] = asyncio.Queue()
        first.daemon.on_up(lambda: restarted.put(None))
        os.kill(first.daemon_pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            await restarted.get()
        assert await directory.rebootstrap([third.addresses[0], f"/ip4/127.0.0.1/tcp/1/p2p/{third.peer[:-1]}x"]) == 1
        await directory.publish(b"first", "m", time.time() + 30)
        assert (await directory.read("m"))[first.peer] == b"first"
        assert set((await second.read("m")).values()) == {b"first", b"second"}


async def test_a_cancelled_lookup_leaks_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hivemind's own leave behind is destroyed while it waits, which asyncio tells the loop's handler."""
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context["message"]))

    async def silent(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    async with swarm(3) as members:
        _, directory = members[0]
        monkeypatch.setattr(directory._node.protocol, "call_find", silent)
        before = asyncio.all_tasks()
        reading = asyncio.create_task(directory.read("m"))
        publishing = asyncio.create_task(directory.publish(b"record", "m", time.time() + 5))
        await asyncio.sleep(0.2)
        assert len(asyncio.all_tasks() - before) > 4, "a search is under way"
        directory._on_host_down()  # as when the daemon dies
        for cancelled in (reading, publishing):
            with pytest.raises(NetworkError):
                await cancelled
        await asyncio.sleep(0.1)
        assert not {task for task in asyncio.all_tasks() - before if not task.done()}
    gc.collect()
    assert not lost


async def test_a_clock_that_differs_from_all_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(3) as members:
        transport, directory = members[0]
        await directory.check_clock()
        # All live in this process and have one clock, so the tolerance is what must change.
        monkeypatch.setattr("hivemind.dht.protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS", -600)
        with pytest.raises(ClockSkew, match="clock"):
            await directory.check_clock()
        joiner = await Libp2pTransport.start(Identity.generate(), HostOptions(peers=transport.addresses))
        try:
            with pytest.raises(ClockSkew, match="clock"):
                await DhtDirectory.start(joiner, transport.addresses)
        finally:
            await joiner.close()


def test_entries_survive_packing() -> None:
    written = [Entry(f"peer{i}", bytes([i]) * i, 1.5 * i) for i in range(200)]
    packed = b"".join(map(entries.pack, written))
    assert entries.unpack(packed) == written
    assert entries.unpack(packed, most=7) == written[:7]
    assert entries.unpack(packed[:-3]) == written[:-1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x01",
        msgpack.packb([[]] * 100_000),
        msgpack.packb({"a": 1}),
        msgpack.packb("x" * 1000),
        msgpack.packb(b"x" * 10_000),
        b"\xa3\xff\xff\xff",
        msgpack.packb(["peer", b"value", 1]),
        msgpack.packb(["peer", "value", 1.0]),
        msgpack.packb([b"peer", b"value", 1.0]),
        msgpack.packb(["peer", b"value"]),
        msgpack.packb(["p" * 65, b"value", 1.0]),
        msgpack.packb(["peer", b"v" * 5000, 1.0]),
        msgpack.packb(msgpack.ExtType(0x50, b"rubbish")),
        b"\x91" * 1_000_000,
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=range(18),
)
def test_what_is_no_entry_ends_a_reply(data: bytes) -> None:
    good = entries.pack(Entry("peer", b"value", 2.0))
    assert entries.unpack(data) == []
    assert entries.unpack(good + data + good)[:1] == [Entry("peer", b"value", 2.0)]
    assert entries.unpack(good + data)[1:] == []


async def test_the_records_of_a_private_swarm() -> None:
    """Non-members in the same DHT neither find nor read them, and what they store there is ignored."""
    secret = SwarmSecret("a secret of our own")
    async with contextlib.AsyncExitStack() as stack:
        members: list[Member] = []
        for chosen in (secret, secret, None, SwarmSecret("another swarm's secret")):
            peers = members[0][0].addresses if members else ()
            transport = await Libp2pTransport.start(Identity.generate(), HostOptions(peers=peers))
            stack.push_async_callback(transport.close)
            directory = await DhtDirectory.start(transport, peers, secret=chosen)
            stack.push_async_callback(directory.close)
            members.append((transport, directory))
        (member, one), (_, two), (outsider, open_one), (_, other) = members
        soon = time.time() + 10
        await one.publish(b"x" * MAX_RECORD, "m", soon)
        assert await two.read("m") == {member.peer: b"x" * MAX_RECORD}
        assert await open_one.read("m") == await other.read("m") == {}
        # A non-member that has learned the name can store there, under its own id, and is ignored.
        for planted in (b"", b"plain", secret.seal(b"sealed for another", f"{member.peer} m".encode())):
            key_id = DHTID.generate(source=secret.name(key("m")))
            soon += 0.01
            entry = entries.sign(outsider.identity, key_id.to_bytes(), planted, soon)
            assert await open_one._node.protocol.call_store(two._node.peer_id, [(key_id, entry)]) == [True]
            assert set(await two.read("m")) == {member.peer}
