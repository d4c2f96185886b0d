"""One reader's view of the swarm: what the directory says, what peers pass on and what it remembers, as one snapshot.

No source alone decides who is seen. The directory is read as before; beside it, a few peers are asked every few
seconds: one that this reader talks to, one at random, sometimes one that it was started with. Each of them tells its
own newest record, so that a live peer is never lost because the directory forgot it.

Owns when and whom to ask, and the file in which records survive a restart. The records themselves are `RecordBook`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from swarm.errors import NetworkError, ProtocolError
from swarm.gossip_messages import RecordsQuery, pack_listed
from swarm.net.base.tasks import TaskSet
from swarm.net.base.tls_addresses import by_peer
from swarm.net.base.transport import Directory
from swarm.net.gossip.policy import GossipPolicy
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordChannel, RecordExchange
from swarm.net.gossip.record_file import RecordFile
from swarm.net.pool.violations import ProtocolViolations
from swarm.records import InvalidRecord
from swarm.types import PeerId, Snapshot

logger = logging.getLogger(__name__)

_FORGED = frozenset({"bad_signature", "malformed", "wrong_model", "over_lived"})
"""What nobody who checks records passes on."""


class GossipPool(Protocol):
    """The part of a `ConnectionPool` that gossip uses."""

    violations: ProtocolViolations

    @property
    def peer(self) -> PeerId: ...

    @property
    def dialled(self) -> tuple[PeerId, ...]: ...

    async def get(
        self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None
    ) -> RecordChannel: ...

    async def drop(self, peer: PeerId, reason: str = ...) -> None: ...


class RecordReader:
    """`await snapshot()` whenever one is needed: that also keeps the gossip going. `close()` before the pool.

    `bootstrap`: multiaddrs of the peers that this program was started with. `rebootstrap`: see `ClientNetwork`.
    """

    def __init__(
        self,
        book: RecordBook,
        directory: Directory,
        pool: GossipPool,
        exchange: RecordExchange,
        *,
        bootstrap: Sequence[str] = (),
        wall_clock: Callable[[], float] = time.time,
        rebootstrap: Callable[[Sequence[str]], Awaitable[int]] | None = None,
        file: RecordFile | None = None,
        rng: random.Random | None = None,
        policy: GossipPolicy = GossipPolicy(),
    ) -> None:
        self.book = book
        self._directory = directory
        self._pool = pool
        self._exchange = exchange
        self._bootstrap = by_peer(bootstrap)
        self._wall_clock = wall_clock
        self._rebootstrap = rebootstrap
        self._file = file
        self._rng = rng or random.Random(os.urandom(16))
        self._policy = policy
        self._tasks = TaskSet("record reader")
        self._examining = asyncio.Lock()
        self._begun = False
        self.is_lacking = True  # layers, in the latest snapshot
        self._next_round = self._next_rebootstrap = 0.0
        self._rounds = 0
        self._asking: set[PeerId] = set()
        self._silent: dict[PeerId, float] = {}  # peer -> until when it is not asked
        self._late_read: asyncio.Task[NetworkError | None] | None = None
        self.has_been_heard = False  # a peer has answered, and so has been told our own record

    @property
    def bootstrap_peers(self) -> Collection[PeerId]:
        """The peers that this program was started with."""
        return self._bootstrap.keys()

    async def snapshot(self) -> Snapshot:
        """The swarm as it is known now. Raises NetworkError if the directory fails and nobody else knows any node."""
        first, self._begun = not self._begun, True
        if first and self._file is not None:
            await self._load(self._file)
        asked = self._ask_some()
        failure = await self._read_directory(asked if first else None)
        await self._examine()
        snapshot = self.book.snapshot(self._wall_clock())
        if failure is not None and not snapshot.nodes:
            raise failure
        self.is_lacking = not _is_whole(snapshot)
        if self._file is not None and self._file.due(asyncio.get_running_loop().time()):
            kept = self.book.longest_known(self._file.max_records)
            self._tasks.start(asyncio.to_thread(self._file.save, kept), "save records")
        return snapshot

    async def tell(self, timeout_s: float) -> None:
        """Ask, and thereby tell our own record to, the peers that we talk to. Best effort, for a goodbye."""
        asked = [self._ask(peer, ()) for peer in self._pool.dialled]
        if asked:
            await asyncio.wait([self._tasks.start(one, "goodbye") for one in asked], timeout=timeout_s)

    def examine_soon(self) -> None:
        """A peer has told its own record. Does not wait."""
        if not self._examining.locked():
            self._tasks.start(self._examine(), "examine")

    async def close(self) -> None:
        await self._tasks.close()
        if self._file is not None and self._begun:
            self._file.save(self.book.longest_known(self._file.max_records))

    # The directory ---------------------------------------------------------------------------------------------------

    async def _read_directory(self, asked: Sequence[asyncio.Task[None]] | None) -> NetworkError | None:
        """-> why it could not be read. A slow one is read on in the background if records are in memory. `asked`: the
        questions of the first round, whose answers are waited for beside it."""
        reading = self._late_read or self._tasks.start(self._read_now(), "read the directory")
        if asked is not None:
            await self._first_answers(reading, asked)
        else:
            patience_s = self._policy.directory_patience_s if self.book.has_live(self._wall_clock()) else None
            await asyncio.wait({reading}, timeout=patience_s)
        if not reading.done():
            self._late_read = reading
            return None
        self._late_read = None
        return reading.result()

    async def _read_now(self) -> NetworkError | None:
        """The error is returned: nobody may be waiting for it."""
        try:
            found = await self._directory.read(self.book.model)
            if not found and await self._rejoined():
                found = await self._directory.read(self.book.model)
        except NetworkError as error:
            return error
        self.book.offer_directory(found)
        return None

    async def _rejoined(self) -> bool:
        """Whether peers answered that may connect us with a directory which has lost everybody."""
        now = asyncio.get_running_loop().time()
        if self._rebootstrap is None or now < self._next_rebootstrap:
            return False
        nodes = self.book.to_ask(self._wall_clock(), self._policy.rebootstrap_peers)
        if not nodes:
            return False
        self._next_rebootstrap = now + self._policy.rebootstrap_interval_s
        return await self._rebootstrap([node.addresses[0] for node in nodes]) > 0

    # Peers -----------------------------------------------------------------------------------------------------------

    async def _first_answers(
        self, reading: asyncio.Task[NetworkError | None], asked: Sequence[asyncio.Task[None]]
    ) -> None:
        """Wait for the directory, and a while for peers. Where these name nodes for all layers, a slow directory is not
        waited for."""
        loop, policy = asyncio.get_running_loop(), self._policy
        answers: set[asyncio.Task[None]] = set(asked)
        until = loop.time() + policy.first_wait_s
        patience_s = policy.directory_patience_s if self.book.has_live(self._wall_clock()) else math.inf
        give_up = loop.time() + patience_s
        while (not reading.done() and loop.time() < give_up) or (answers and loop.time() < until):
            waiting: set[asyncio.Task[Any]] = {*answers} if reading.done() else {reading, *answers}
            latest = until if reading.done() else give_up if loop.time() >= until else min(until, give_up)
            timeout_s = None if latest == math.inf else latest - loop.time()
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            answers = {answer for answer in answers if not answer.done()}
            if self.has_been_heard:  # one may not know all, or not say so
                until = min(until, loop.time() + policy.first_grace_s)
                if policy.first_without_directory and _is_whole(self.book.snapshot(self._wall_clock())):
                    give_up = min(give_up, until)

    def _ask_some(self) -> list[asyncio.Task[None]]:
        """Begin a round of questions, if one is due."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._tasks.closed or now < self._next_round:
            return []
        self._next_round = now + (self._policy.urgent_interval_s if self.is_lacking else self._policy.interval_s)
        targets = self._targets(now)
        self._rounds += 1
        return [self._tasks.start(self._ask(peer, addresses), f"ask {peer}") for peer, addresses in targets.items()]

    def _targets(self, now: float) -> dict[PeerId, tuple[str, ...]]:
        """Whom to ask now: peer -> addresses. No peer that others named decides alone who these are."""
        self._silent = {peer: until for peer, until in self._silent.items() if until > now}
        excluded = {*self._silent, *self._asking, self._pool.peer}
        linked = [peer for peer in self._pool.dialled if peer not in excluded]
        targets: dict[PeerId, tuple[str, ...]] = {}
        if linked:
            targets[min(linked, key=self._published_at)] = ()  # whose record is oldest: it must not be lost
            targets[self._rng.choice(linked)] = ()
        anchors = [peer for peer in self._bootstrap if peer not in excluded and peer not in targets]
        if self.is_lacking or self._rounds % 4 == 0:
            count = self._policy.fanout if self.is_lacking else 1
            for peer in self._rng.sample(anchors, min(count, len(anchors))):
                targets[peer] = self._bootstrap[peer]
        if len(self._pool.dialled) < self._policy.min_links:
            wall_now = self._wall_clock()
            nodes = self.book.to_ask(wall_now, self._policy.fanout, {*excluded, *targets})
            wanted = 1 if self.book.has_live(wall_now) else self._policy.fanout
            for node in nodes[:wanted]:
                targets[node.peer] = node.addresses
        return targets

    def _published_at(self, peer: PeerId) -> float:
        record = self.book.record_of(peer)
        return record.at if record is not None else 0.0

    async def _ask(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self._asking.add(peer)
        try:
            for _ in range(1 + self._policy.max_follow_ups):
                if not await self._ask_once(peer, addresses):
                    return
        except NetworkError as error:
            logger.debug("no records from %s: %s", peer, error)
            self._silent[peer] = asyncio.get_running_loop().time() + self._policy.silent_s
        finally:
            self._asking.discard(peer)

    async def _ask_once(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        """-> whether the peer has more. Raises NetworkError."""
        timeout_s, now = self._policy.ask_timeout_s, self._wall_clock()
        link = await self._pool.get(peer, addresses, timeout_s)
        listed, number, slices = self.book.listing(now)
        query = RecordsQuery(0, self.book.model, pack_listed(listed), number, slices, own=self.book.own_record(now))
        answer = await self._exchange.ask(link, query, timeout_s)
        try:
            for record in answer.records:
                self.book.offer(record, peer)
        except InvalidRecord as error:
            await self._blame(peer, error)
            raise
        await self._examine()
        self.has_been_heard = True
        return answer.more and bool(answer.records)

    # Records ---------------------------------------------------------------------------------------------------------

    async def _examine(self) -> None:
        """Verify what was offered, a few milliseconds at a time."""
        async with self._examining:
            now, step = self._wall_clock(), self._policy.slice_records
            offered = self.book.to_examine(now)
            for first in range(0, len(offered), step):
                if first:
                    await asyncio.sleep(0)
                for one, error in self.book.examine(offered[first : first + step], now):
                    if one.source and error.reason in _FORGED:
                        await self._blame(one.source, error)

    async def _blame(self, peer: PeerId, error: ProtocolError) -> None:
        """`peer` has passed on what nobody passes on who checks it."""
        self._pool.violations.record(peer, error)
        await self._pool.drop(peer, f"it passed on a forged record: {error}")

    async def _load(self, file: RecordFile) -> None:
        now = self._wall_clock()
        for number, (data, first_seen) in enumerate(await asyncio.to_thread(file.load)):
            with contextlib.suppress(InvalidRecord):  # of another build, or somebody has changed the file
                self.book.remember(data, first_seen, now)
            if number % self._policy.slice_records == 0:
                await asyncio.sleep(0)


def _is_whole(snapshot: Snapshot) -> bool:
    """Whether each layer has a node; without any record, a reader may not know how many layers there are."""
    return snapshot.num_layers > 0 and not snapshot.missing()
