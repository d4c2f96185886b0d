"""The live map of who serves what, kept in hivemind's DHT, whose node runs in our own event loop.

Owns publishing, withdrawing and reading the records of a model: one key a model, one subkey a peer, so that a single
look-up finds them all. Knows neither what records say nor whether they are true; who may write is `dht_guard`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from swarm.errors import NetworkError, PeerUnreachable
from swarm.net.daemon_streams import DaemonCarrier
from swarm.net.dht_guard import OwnedSubkeys, guard
from swarm.net.hivemind_parts import P2P, DHTNode, DHTValidationError, HivemindMultiaddr
from swarm.records import MAX_LIFETIME_S, MAX_RECORD, key
from swarm.types import PeerId

REPLICAS = 5
BEAM = 8  # peers a look-up visits: those that hold the key, and a few for those that have left
WORKERS = 8
TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
TICK_S = 1e-3  # a replacement must expire later than what it replaces


class DhtDirectory:
    """See `carrier.Directory`. Made by `await DhtDirectory.start(carrier, peers)`; close it before the carrier."""

    def __init__(self, carrier: DaemonCarrier, p2p: P2P, node: DHTNode) -> None:
        self._carrier = carrier
        self._p2p = p2p
        self._node = node
        self._expiry: dict[str, float] = {}  # of what we last published, by model

    @classmethod
    async def start(cls, carrier: DaemonCarrier, peers: Sequence[str] = (), client: bool = False) -> DhtDirectory:
        """Join the DHT by way of `peers`, or begin one. A `client` reads, but keeps nothing for others.

        Raises PeerUnreachable if none of `peers` answers, NetworkError if this machine's clock is off.
        """
        validator = OwnedSubkeys(carrier.identity, time.time)
        p2p = await P2P.replicate(HivemindMultiaddr(f"/unix{carrier.control.path}"))
        try:
            node = await DHTNode.create(
                p2p=p2p,
                initial_peers=list(peers) or None,
                num_replicas=REPLICAS,
                num_workers=WORKERS,
                client_mode=client,
                record_validator=validator,
                # Records live for seconds: caching them would only serve stale ones.
                cache_locally=False,
                cache_on_store=False,
                cache_nearest=0,
                cache_refresh_before_expiry=0,
            )
        except DHTValidationError as error:
            await p2p.shutdown()
            raise NetworkError(f"cannot take part in the directory: {error}; is this machine's clock right?") from None
        except RuntimeError:
            await p2p.shutdown()
            raise PeerUnreachable(f"none of the peers to join has a directory: {', '.join(peers)}") from None
        except BaseException:
            await p2p.shutdown()
            raise
        guard(node, validator)
        return cls(carrier, p2p, node)

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        if len(record) > MAX_RECORD:
            raise NetworkError(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD}")
        latest = self._expiry.get(model, 0.0) + TICK_S
        await self._store(record, model, max(min(expires_at, time.time() + MAX_LIFETIME_S), latest))

    async def withdraw(self, model: str) -> None:
        """Readers see us gone at once; the empty record that tells them so lives as long as our last one would have."""
        expiry = self._expiry.pop(model, 0.0)
        if expiry > time.time():
            await self._store(b"", model, expiry + TICK_S)

    async def read(self, model: str) -> dict[PeerId, bytes]:
        self._check()
        async with _deadline("read"):
            found = await self._node.get(key(model), latest=True, beam_size=BEAM, num_workers=WORKERS)
        entries: Any = found.value if found is not None else {}
        now = time.time()
        return {
            peer: entry.value
            for peer, entry in sorted(entries.items())
            if entry.expiration_time > now and isinstance(entry.value, bytes) and entry.value
        }

    async def close(self) -> None:
        """Leave the DHT. Idempotent."""
        if not self._carrier.failed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):  # a dying daemon never answers
                    await self._node.shutdown()
        await self._p2p.shutdown()

    async def _store(self, record: bytes, model: str, expires_at: float) -> None:
        self._check()
        self._expiry[model] = expires_at
        async with _deadline("publish in"):
            stored = await self._node.store(
                key(model), record, expires_at, subkey=self._carrier.peer, beam_size=BEAM, num_workers=WORKERS
            )
        if not stored:
            raise NetworkError("no peer would keep our record; is this machine's clock right?")

    def _check(self) -> None:
        if self._carrier.failed.is_set():
            raise NetworkError("the p2p daemon has died")


@contextlib.asynccontextmanager
async def _deadline(what: str) -> Any:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except TimeoutError:
        raise NetworkError(f"could not {what} the directory within {TIMEOUT_S:g} s") from None
