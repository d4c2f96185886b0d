"""The live records of who serves what, kept in hivemind's DHT, whose node runs in our own event loop.

Owns publishing and reading the records of a model: one key a model, one entry a peer, so that one lookup
finds them all. No replica set decides who is seen: a record goes to the peers nearest to its key and to the
longest-known ones (`lookup`), both are asked, and whoever has read an entry serves it to others until it expires.
Knows neither the contents of the records nor whether they are true.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from swarm.address_blocks import is_public_block, spread
from swarm.errors import ClockSkew, NetworkError, PeerUnreachable, ProtocolError
from swarm.net.base.tls_addresses import libp2p_addresses
from swarm.net.dht import entries
from swarm.net.dht.entries import Entry
from swarm.net.dht.entry_intake import take_in
from swarm.net.dht.entry_store import EntryStore, PeerFacts
from swarm.net.dht.lookup import Lookup
from swarm.net.dht.node_ids import dht_id
from swarm.net.dht.peer_blocks import PeerBlocks
from swarm.net.dht.peer_history import PeerHistory
from swarm.net.dht.policy import DhtPolicy
from swarm.net.dht.protocol import NodeParts
from swarm.net.dht.verification_budget import VerificationBudget
from swarm.net.libp2p._hivemind import DHTID, DHTNode, DHTValidationError, PeerID
from swarm.net.security.proof_of_work import proof_bits
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.records import MAX_LIFETIME_S, MAX_RECORD, key, proof_of
from swarm.token_bucket import TokenBucket
from swarm.types import PeerId

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

EXPIRY_STEP_S = 1e-3  # a replacement must expire later than what it replaces


class DhtDirectory:
    """See `transport.Directory`. Made by `await DhtDirectory.start(transport, peers)`; close it before the transport.

    When the libp2p host dies, pending calls fail at once; after its restart, the directory joins by the same `peers`,
    if they are still there. `rebootstrap` adds peers that are known to be live.
    """

    def __init__(
        self,
        transport: Libp2pTransport,
        peers: Sequence[str],
        client: bool,
        secret: SwarmSecret | None,
        policy: DhtPolicy,
    ) -> None:
        self._transport = transport
        self._policy = policy
        self._secret = secret
        self._peers = tuple(peers)
        self._client = client
        clock = asyncio.get_running_loop().time
        self._blocks = PeerBlocks(transport.control.connected, clock)
        self._clock = clock
        self._budget = VerificationBudget(clock, policy.verification)
        rate, burst = policy.read_bytes_per_s, policy.read_bytes_burst
        self._read_bytes, self._narrow_bytes = TokenBucket(rate, burst), TokenBucket(rate / 2, burst / 2)
        facts = PeerFacts(self._blocks.of, _proof_bits)
        self._held = EntryStore(time.time, os.urandom(16), policy.store, PeerHistory(policy.history), facts)
        self._joined: tuple[Any, DHTNode] | None = None  # None while the host is down
        self._calls: set[asyncio.Task[Any]] = set()
        self._published: dict[str, tuple[bytes, float]] = {}  # by model: our last record, and when it expires

    @classmethod
    async def start(
        cls,
        transport: Libp2pTransport,
        peers: Sequence[str] = (),
        client: bool = False,
        secret: SwarmSecret | None = None,
        policy: DhtPolicy = DhtPolicy(),
    ) -> DhtDirectory:
        """Join the DHT by way of `peers`, or start one. A `client` reads, but stores nothing for others. With `secret`
        the records are those of a private swarm: encrypted, under keys that only members can compute.

        Raises PeerUnreachable if none of `peers` answers, ClockSkew if this machine's clock is off, NetworkError.
        """
        peers = libp2p_addresses(peers)
        self = cls(transport, peers, client, secret, policy)
        await self._join(peers)
        transport.daemon.on_down(self._on_host_down)
        transport.daemon.on_up(self._on_host_up)
        return self

    async def _join(self, peers: Sequence[str]) -> None:
        p2p = await self._transport.daemon.hivemind_p2p()
        try:
            node = await DHTNode.create(
                p2p=p2p,
                node_id=dht_id(p2p.peer_id),
                initial_peers=list(peers) or None,
                num_replicas=self._policy.replicas,
                num_workers=self._policy.num_workers,
                wait_timeout=self._policy.wait_timeout_s,
                client_mode=self._client,
                record_validator=NodeParts(self._held, self._budget, self._blocks, self._policy.routing),
                # Our own `Lookup` and `EntryStore` do the rest.
                cache_locally=False,
                cache_on_store=False,
                cache_nearest=0,
                cache_refresh_before_expiry=0,
                reuse_get_requests=False,
            )
        except DHTValidationError as error:
            await p2p.shutdown()
            raise _join_error(error) from None
        except RuntimeError:
            await p2p.shutdown()
            raise PeerUnreachable(f"none of the peers to join has a directory: {', '.join(peers)}") from None
        except BaseException:
            await p2p.shutdown()
            raise
        self._joined = p2p, node

    def _on_host_down(self) -> None:
        """The host has died: pending calls will never be answered."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined[0]._terminate()
        self._cancel_calls()

    def _cancel_calls(self) -> None:
        for call in self._calls:
            call.cancel()

    async def _on_host_up(self) -> None:
        before, self._published = self._published, {}
        await self._join(())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._policy.ping_timeout_s):
                await self.rebootstrap(self._peers)
        for model, (record, expires_at) in before.items():
            if expires_at > time.time():
                with contextlib.suppress(NetworkError):  # its publisher will repeat it
                    await self._store(record, model, expires_at)

    async def rebootstrap(self, addresses: Sequence[str]) -> int:
        """Add the peers at these multiaddrs to our routing table, and us to theirs (again); how many answered.

        Raises NetworkError.
        """
        node = self._node
        async with asyncio.TaskGroup() as group:
            pings = [group.create_task(self._rebootstrap(node, address)) for address in libp2p_addresses(addresses)]
        return sum(ping.result() for ping in pings)

    async def _rebootstrap(self, node: DHTNode, address: str) -> bool:
        peer = address.rpartition("/p2p/")[2]
        try:
            peer_id = PeerID.from_base58(peer)
            timeout_s = self._policy.ping_timeout_s
            await self._call("ping a peer of", self._transport.control.connect(peer, (address,)), timeout_s)
            node.blacklist.register_success(peer_id)
            return await self._call("ping a peer of", node.protocol.call_ping(peer_id), timeout_s) is not None
        except (NetworkError, ValueError) as error:
            logger.debug("%s did not answer: %s", address, error)
            return False

    async def check_clock(self) -> None:
        """Compare our clock with that of a few peers. Raises ClockSkew when it differs from all of theirs.

        One peer alone proves nothing: it may be the one whose clock is wrong.
        """
        node = self._node
        known = list(node.protocol.routing_table.peer_id_to_uid)
        wrong: list[DHTValidationError] = []
        for peer in random.sample(known, min(len(known), self._policy.clock_check_peers)):
            try:
                ping = node.protocol.call_ping(peer, validate=True)
                if await self._call("ping a peer of", ping, self._policy.ping_timeout_s) is not None:
                    return
            except DHTValidationError as error:
                wrong.append(error)
            except NetworkError as error:
                logger.debug("no clock check with %s: %s", peer, error)
        if len(wrong) > 1:
            raise _join_error(wrong[0])

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        if len(record) > MAX_RECORD:
            raise NetworkError(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD}")
        latest = self._expiry(model) + EXPIRY_STEP_S
        await self._store(record, model, max(min(expires_at, time.time() + MAX_LIFETIME_S), latest))

    async def read(self, model: str) -> dict[PeerId, bytes]:
        """By peer, those first that are most worth a look: the longest known, the proven, and a share of the rest."""
        key_id = self._key_id(model)
        key = key_id.to_bytes()
        await self._call("read", self._take_in(key_id))
        records: dict[PeerId, bytes] = {}
        for entry in self._held.entries(key):
            record = self._unsealed(entry.payload, entry.peer, model)
            if record:
                records[entry.peer] = record
        return records

    async def _take_in(self, key_id: DHTID) -> None:
        """Ask the DHT for the entries of a key, check what is new, and hold it, for us and for others.

        What replies bring is bounded on average: after a lookup that brought very much, as in a large swarm or under a
        flood of entries, only a few peers are asked for a while, and then nobody.
        """
        node, now = self._node, self._clock()
        self._held.pin(key_id.to_bytes())
        narrow = self._read_bytes.available(now) <= 0.0
        allowance = self._narrow_bytes if narrow else self._read_bytes
        if allowance.available(now) <= 0.0:
            return
        found = await Lookup(node, key_id, self._policy, narrow).run()
        allowance.spend(found.entry_bytes, self._clock())
        for liar in await take_in(key_id.to_bytes(), found.replies, self._held, self._budget, time.time()):
            logger.debug("%s replied with entries that nobody signed", liar)
            node.blacklist.register_failure(liar)
        if len(node.blacklist.ban_counter) > self._policy.max_blacklist:
            node.blacklist.clear()

    async def close(self) -> None:
        """Leave the DHT. Idempotent."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        self._cancel_calls()
        p2p, node = joined
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._policy.close_timeout_s):
                await node.shutdown()
        await p2p.shutdown()

    async def _store(self, record: bytes, model: str, expires_at: float) -> None:
        self._published[model] = record, expires_at
        key_id = self._key_id(model)
        entry = entries.sign(self._transport.identity, key_id.to_bytes(), self._sealed(record, model), expires_at)
        if not await self._call("publish in", self._distribute(key_id, entry)):
            raise NetworkError("no peer stored our record; is this machine's clock right?")

    async def _distribute(self, key_id: DHTID, entry: Entry) -> bool:
        """Store an entry here, at the longest-known peers, and at those nearest to the key; whether anybody kept it."""
        node = self._node
        key = key_id.to_bytes()
        self._held.pin(key)
        kept = self._held.put(key, entry)
        # The place beside the key: the same peers are nearest to it, and they need not send what they hold.
        found = await Lookup(node, DHTID(key_id ^ 1), self._policy).run()
        anchors = [peer for peer in found.anchors if peer in found.answered]
        nearest = self._spread(found.answered)
        replicas = list(dict.fromkeys([*anchors, *nearest[: self._policy.replicas]]))
        spare = [peer for peer in nearest if peer not in replicas]
        kept_by = await self._store_at(node, replicas, key_id, entry)
        kept_by += await self._store_at(node, spare[: len(replicas) - kept_by], key_id, entry)
        return kept or kept_by > 0

    async def _store_at(self, node: DHTNode, peers: Sequence[PeerID], key_id: DHTID, entry: Entry) -> int:
        """How many of `peers` keep the entry, as far as they say so in time."""
        if not peers:
            return 0
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(node.protocol.call_store(peer, [(key_id, entry)])) for peer in peers]
            done, late = await asyncio.wait(calls, timeout=self._policy.patience_s)
            for call in late:
                call.cancel()
        return sum(any(call.result() or ()) for call in done)

    def _spread(self, peers: Sequence[PeerID]) -> list[PeerID]:
        """All of `peers`, the first of them so that no public address block has most of the replicas."""
        places, share = self._policy.replicas, self._policy.replica_block_share

        def most(block: str) -> float:
            return places * share if is_public_block(block) else places

        first = spread(peers, places, lambda peer: self._blocks.of(peer.to_base58()), most)
        return [*first, *(peer for peer in peers if peer not in first)]

    def _expiry(self, model: str) -> float:
        """Of our last record; 0 if there is none."""
        return self._published.get(model, (b"", 0.0))[1]

    def _key_id(self, model: str) -> DHTID:
        return DHTID.generate(source=self._name(model))

    def _name(self, model: str) -> str:
        return key(model) if self._secret is None else self._secret.name(key(model))

    def _sealed(self, record: bytes, model: str) -> bytes:
        return record if self._secret is None else self._secret.seal(record, _context(self._transport.peer, model))

    def _unsealed(self, stored: bytes, peer: PeerId, model: str) -> bytes:
        """What `peer` published; empty if it was not sealed by a member of this swarm for that peer and model."""
        if self._secret is None:
            return stored
        try:
            return self._secret.unseal(stored, _context(peer, model))
        except ProtocolError:
            return b""

    @property
    def _node(self) -> DHTNode:
        """Raises NetworkError while the host is down."""
        if self._joined is None:
            raise NetworkError("the p2p daemon is down")
        return self._joined[1]

    async def _call(self, what: str, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """One DHT call, in a task of its own: when it is cancelled, so are all tasks that it has started.

        Raises NetworkError on a timeout and when the host dies, and what the call does.
        """
        timeout_s = self._policy.call_timeout_s if timeout_s is None else timeout_s
        task = asyncio.get_running_loop().create_task(call, name=f"to {what} the directory")
        self._calls.add(task)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            self._calls.discard(task)
            in_time = task.done()
            task.cancel()
        if not in_time:
            raise NetworkError(f"could not {what} the directory within {timeout_s:g} s")
        if task.cancelled():
            raise NetworkError("the p2p daemon has died")
        return task.result()


def _proof_bits(entry: Entry) -> int:
    """What the record in an entry proves; nothing if it is sealed, as all members of a private swarm are trusted."""
    return proof_bits(entry.peer, proof_of(entry.payload), time.time())


def _context(peer: PeerId, model: str) -> bytes:
    """What a sealed record is bound to."""
    return f"{peer} {model}".encode()


def _join_error(error: DHTValidationError) -> NetworkError:
    """hivemind has one error type for differing clocks and for unreachable nodes."""
    if "local time" in str(error):
        return ClockSkew(
            "this machine's clock differs from the others' by more than 3 s; set it (for instance with "
            "`timedatectl set-ntp true`) and start again"
        )
    return NetworkError(f"cannot take part in the directory: {error}")
