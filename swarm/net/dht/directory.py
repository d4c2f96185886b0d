"""The live records of who serves what, kept in hivemind's DHT, whose node runs in our own event loop.

Owns publishing, withdrawing and reading the records of a model: one key a model, one subkey a peer, so that one lookup
finds them all. Knows neither the contents of the records nor whether they are true; `validation` decides who may write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm.errors import ClockSkew, NetworkError, PeerUnreachable, ProtocolError
from swarm.net.dht.validation import SignedSubkeyValidator, install_validators
from swarm.net.libp2p._hivemind import DHTID, DHTNode, DHTValidationError, PeerID
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.records import MAX_LIFETIME_S, MAX_RECORD, key
from swarm.types import PeerId

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

EXPIRY_STEP_S = 1e-3  # a replacement must expire later than what it replaces


@dataclass(frozen=True, slots=True)
class DhtPolicy:
    """Redundancy and timeouts of the DHT. Times in seconds."""

    replicas: int = 5  # of each record: churn that it survives against traffic
    beam_size: int = 8  # peers that a lookup visits: the replicas, and a few for those that have left
    num_workers: int = 8  # of those at once
    call_timeout_s: float = 10.0  # for a lookup or a store
    ping_timeout_s: float = 3.0  # for one peer, or for the bootstrap peers after a restart
    close_timeout_s: float = 1.0  # to leave the DHT; a dying host never answers
    clock_check_peers: int = 5  # whose clocks are compared with ours


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
        self._validator = SignedSubkeyValidator(transport.identity, time.time)
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
                node_id=DHTID.generate(source=self._transport.peer),  # the same after a restart
                initial_peers=list(peers) or None,
                num_replicas=self._policy.replicas,
                num_workers=self._policy.num_workers,
                client_mode=self._client,
                record_validator=self._validator,
                # Records live for seconds: caching them would only serve stale ones.
                cache_locally=False,
                cache_on_store=False,
                cache_nearest=0,
                cache_refresh_before_expiry=0,
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
        install_validators(node, self._validator)
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
            pings = [group.create_task(self._rebootstrap(node, address)) for address in addresses]
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

    async def withdraw(self, model: str) -> None:
        """Readers see us gone at once: an empty record replaces our last one until that would have expired."""
        expiry = self._expiry(model)
        self._published.pop(model, None)
        if expiry > time.time():
            await self._store(b"", model, expiry + EXPIRY_STEP_S)

    async def read(self, model: str) -> dict[PeerId, bytes]:
        node = self._node
        lookup = node.get(
            self._name(model),
            latest=True,
            beam_size=self._policy.beam_size,
            num_workers=self._policy.num_workers,
        )
        found = await self._call("read", lookup)
        entries: Any = found.value if found is not None else {}
        now = time.time()
        records: dict[PeerId, bytes] = {}
        for peer, entry in sorted(entries.items()):
            if entry.expiration_time > now and isinstance(entry.value, bytes):
                record = self._unsealed(entry.value, peer, model)
                if record:
                    records[peer] = record
        return records

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
        node = self._node
        self._published[model] = record, expires_at
        storing = node.store(
            self._name(model),
            self._sealed(record, model),
            expires_at,
            subkey=self._transport.peer,
            beam_size=self._policy.beam_size,
            num_workers=self._policy.num_workers,
        )
        if not await self._call("publish in", storing):
            raise NetworkError("no peer stored our record; is this machine's clock right?")

    def _expiry(self, model: str) -> float:
        """Of our last record; 0 if there is none."""
        return self._published.get(model, (b"", 0.0))[1]

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
