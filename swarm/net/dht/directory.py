"""The live map of who serves what, kept in hivemind's DHT, whose node runs in our own event loop.

Owns publishing, withdrawing and reading the records of a model: one key a model, one subkey a peer, so that a single
look-up finds them all. Knows neither what records say nor whether they are true; who may write is `dht_guard`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Coroutine, Sequence
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

REPLICAS = 5
BEAM = 8  # peers a look-up visits: those that hold the key, and a few for those that have left
WORKERS = 8
TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
MEET_TIMEOUT_S = 3.0
CLOCK_PEERS = 5
TICK_S = 1e-3  # a replacement must expire later than what it replaces


class DhtDirectory:
    """See `transport.Directory`. Made by `await DhtDirectory.start(transport, peers)`; close it before the transport.

    When the transport's daemon dies, what is under way fails at once; when it is back, it joins by way of the same
    `peers`, if they are still there; whoever knows others better has it `meet` them.
    """

    def __init__(
        self, transport: Libp2pTransport, peers: Sequence[str], client: bool, secret: SwarmSecret | None = None
    ) -> None:
        self._transport = transport
        self._secret = secret
        self._peers = tuple(peers)
        self._client = client
        self._validator = SignedSubkeyValidator(transport.identity, time.time)
        self._joined: tuple[Any, DHTNode] | None = None  # None while the daemon is down
        self._calls: set[asyncio.Task[Any]] = set()
        self._published: dict[str, tuple[bytes, float]] = {}  # by model: our last record, and when it expires

    @classmethod
    async def start(
        cls,
        transport: Libp2pTransport,
        peers: Sequence[str] = (),
        client: bool = False,
        secret: SwarmSecret | None = None,
    ) -> DhtDirectory:
        """Join the DHT by way of `peers`, or begin one. A `client` reads, but keeps nothing for others. With `secret`
        the records are those of a private swarm: stored under names that strangers cannot guess, and sealed.

        Raises PeerUnreachable if none of `peers` answers, ClockSkew if this machine's clock is off, NetworkError.
        """
        self = cls(transport, peers, client, secret)
        await self._join(peers)
        transport.daemon.on_down(self._down)
        transport.daemon.on_up(self._up)
        return self

    async def _join(self, peers: Sequence[str]) -> None:
        p2p = await self._transport.daemon.hivemind_p2p()
        try:
            node = await DHTNode.create(
                p2p=p2p,
                node_id=DHTID.generate(source=self._transport.peer),  # one that starts again is not taken for another
                initial_peers=list(peers) or None,
                num_replicas=REPLICAS,
                num_workers=WORKERS,
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
            raise _refused(error) from None
        except RuntimeError:
            await p2p.shutdown()
            raise PeerUnreachable(f"none of the peers to join has a directory: {', '.join(peers)}") from None
        except BaseException:
            await p2p.shutdown()
            raise
        install_validators(node, self._validator)
        self._joined = p2p, node

    def _down(self) -> None:
        """The daemon has died: nobody will answer what is under way."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined[0]._terminate()
        self._give_up_hivemind_p2p()

    def _give_up_calls(self) -> None:
        for call in self._calls:
            call.cancel()

    async def _up(self) -> None:
        before, self._published = self._published, {}
        await self._join(())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEET_TIMEOUT_S):
                await self.rebootstrap(self._peers)
        for model, (record, expires_at) in before.items():
            if expires_at > time.time():
                with contextlib.suppress(NetworkError):  # whose record it is will publish it again
                    await self._store(record, model, expires_at)

    async def rebootstrap(self, addresses: Sequence[str]) -> int:
        """Get to know the peers at these multiaddrs (again), and they us; how many answered. Raises NetworkError."""
        node = self._node
        async with asyncio.TaskGroup() as group:
            meetings = [group.create_task(self._rebootstrap(node, address)) for address in addresses]
        return sum(meeting.result() for meeting in meetings)

    async def _rebootstrap(self, node: DHTNode, address: str) -> bool:
        peer = address.rpartition("/p2p/")[2]
        try:
            peer_id = PeerID.from_base58(peer)
            await self._ask("meet a peer of", self._transport.control.connect(peer, (address,)), MEET_TIMEOUT_S)
            node.blacklist.register_success(peer_id)
            return await self._ask("meet a peer of", node.protocol.call_ping(peer_id), MEET_TIMEOUT_S) is not None
        except (NetworkError, ValueError) as error:
            logger.debug("%s cannot be met: %s", address, error)
            return False

    async def check_clock(self) -> None:
        """Compare our clock with that of a few peers. Raises ClockSkew when it differs from all of theirs.

        One peer alone proves nothing: it may be the one whose clock is wrong.
        """
        node = self._node
        known = list(node.protocol.routing_table.peer_id_to_uid)
        wrong: list[DHTValidationError] = []
        for peer in random.sample(known, min(len(known), CLOCK_PEERS)):
            try:
                ping = node.protocol.call_ping(peer, validate=True)
                if await self._ask("ask a peer of", ping, MEET_TIMEOUT_S) is not None:
                    return
            except DHTValidationError as error:
                wrong.append(error)
            except NetworkError as error:
                logger.debug("%s does not tell its time: %s", peer, error)
        if len(wrong) > 1:
            raise _refused(wrong[0])

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        if len(record) > MAX_RECORD:
            raise NetworkError(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD}")
        latest = self._expiry(model) + TICK_S
        await self._store(record, model, max(min(expires_at, time.time() + MAX_LIFETIME_S), latest))

    async def withdraw(self, model: str) -> None:
        """Readers see us gone at once; the empty record that tells them so lives as long as our last one would have."""
        expiry = self._expiry(model)
        self._published.pop(model, None)
        if expiry > time.time():
            await self._store(b"", model, expiry + TICK_S)

    async def read(self, model: str) -> dict[PeerId, bytes]:
        node = self._node
        looking = node.get(self._name(model), latest=True, beam_size=BEAM, num_workers=WORKERS)
        found = await self._ask("read", looking)
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
        self._give_up_hivemind_p2p()
        p2p, node = joined
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # a dying daemon never answers
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
            beam_size=BEAM,
            num_workers=WORKERS,
        )
        if not await self._ask("publish in", storing):
            raise NetworkError("no peer would keep our record; is this machine's clock right?")

    def _expiry(self, model: str) -> float:
        """Of what we published last."""
        return self._published.get(model, (b"", 0.0))[1]

    def _name(self, model: str) -> str:
        return key(model) if self._secret is None else self._secret.name(key(model))

    def _sealed(self, record: bytes, model: str) -> bytes:
        return record if self._secret is None else self._secret.seal(record, _about(self._transport.peer, model))

    def _unsealed(self, stored: bytes, peer: PeerId, model: str) -> bytes:
        """What `peer` published; nothing if no member of this swarm sealed it for that."""
        if self._secret is None:
            return stored
        try:
            return self._secret.unseal(stored, _about(peer, model))
        except ProtocolError:
            return b""

    @property
    def _node(self) -> DHTNode:
        """Raises NetworkError while there is none."""
        if self._joined is None:
            raise NetworkError("the p2p daemon is down")
        return self._joined[1]

    async def _ask(self, what: str, call: Coroutine[Any, Any, _T], seconds: float = TIMEOUT_S) -> _T:
        """One call of the DHT's, in a task of its own: what is given up takes all tasks along that it has begun.

        Raises NetworkError when it takes too long and when the daemon dies, and what the call does.
        """
        task = asyncio.get_running_loop().create_task(call, name=f"to {what} the directory")
        self._calls.add(task)
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            self._calls.discard(task)
            in_time = task.done()
            task.cancel()
        if not in_time:
            raise NetworkError(f"could not {what} the directory within {seconds:g} s")
        if task.cancelled():
            raise NetworkError("the p2p daemon has died")
        return task.result()


def _about(peer: PeerId, model: str) -> bytes:
    return f"{peer} {model}".encode()


def _refused(error: DHTValidationError) -> NetworkError:
    """hivemind says in one kind of error that clocks differ and that we cannot be reached."""
    if "local time" in str(error):
        return ClockSkew(
            "this machine's clock differs from the others' by more than 3 s; set it (for instance with "
            "`timedatectl set-ntp true`) and start again"
        )
    return NetworkError(f"cannot take part in the directory: {error}")
