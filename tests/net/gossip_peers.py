"""Readers that pass records on to each other, over any transport, each beside a directory of the test's choice."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from record_makers import LAYERS, MODEL

from swarm import records
from swarm.errors import NetworkError
from swarm.gossip_messages import Records, RecordsQuery
from swarm.messages import AnyMessage
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Transport
from swarm.net.gossip.policy import AnswerPolicy, GossipPolicy
from swarm.net.gossip.record_answers import RecordAnswers
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordExchange
from swarm.net.gossip.record_file import RecordFile
from swarm.net.gossip.record_reader import RecordReader
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.security.identity import Identity, verify
from swarm.types import LayerSpan, NodeProfile, NodeState, PeerId


class Swallowed:
    """A directory that takes every record and shows none, or only `shown`."""

    def __init__(self, shown: dict[PeerId, bytes] | None = None, broken: bool = False) -> None:
        self.shown = shown or {}
        self.broken = broken

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        return None

    async def read(self, model: str) -> dict[PeerId, bytes]:
        if self.broken:
            raise NetworkError("the directory does not answer")
        return dict(self.shown)


class GossipPeer:
    """A node, or (`is_node=False`) a client, of which only the records are real. `await serve()`, `await close()`."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        wall_clock: Callable[[], float],
        *,
        bootstrap: Sequence[str] = (),
        directory: Swallowed | None = None,
        is_node: bool = True,
        file: RecordFile | None = None,
        rebootstrap: Callable[[Sequence[str]], Awaitable[int]] | None = None,
        answer_policy: AnswerPolicy = AnswerPolicy(),
    ) -> None:
        self.identity = identity
        self.peer = identity.peer
        self.transport = transport
        self._wall_clock = wall_clock
        self.is_node = is_node
        self.tasks = TaskSet("test")
        self.exchange = RecordExchange()
        self.pool = ConnectionPool(transport, self._on_frame)
        self.book = RecordBook(
            MODEL,
            LAYERS,
            verify,
            random.Random(3),
            own=self.peer if is_node else "",
            is_connected=self.pool.has_dialled,
        )
        self.directory = directory or Swallowed()
        self.reader = RecordReader(
            self.book,
            self.directory,
            self.pool,
            self.exchange,
            bootstrap=bootstrap,
            wall_clock=wall_clock,
            file=file,
            rebootstrap=rebootstrap,
            rng=random.Random(4),
            policy=GossipPolicy(),
        )
        self.answers = RecordAnswers(self.book, self.tasks, wall_clock, self.reader.examine_soon, answer_policy)

    async def serve(self) -> None:
        await self.pool.serve()

    def publish(self) -> None:
        """A new record of its own."""
        self.book.keep_own(self.record(), self._wall_clock())

    def record(self) -> bytes:
        profile = NodeProfile(
            self.peer,
            "n",
            NodeState.SERVING,
            "fp32",
            "h",
            LAYERS,
            LayerSpan(0, LAYERS),
            tuple(self.transport.addresses),
            published_at=self._wall_clock(),
        )
        return records.encode(profile, MODEL, LAYERS, 12.0, self.identity.sign)[0]

    async def seen(self) -> set[PeerId]:
        return {node.peer for node in (await self.reader.snapshot()).nodes}

    async def close(self) -> None:
        await self.reader.close()
        await self.tasks.close()
        await self.pool.close()
        await self.transport.close()

    async def _on_frame(self, link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        if isinstance(message, Records):
            self.exchange.on_records(link.peer, message, body)
        elif isinstance(message, RecordsQuery) and self.is_node:
            self.answers.on_query(link, message, body)
