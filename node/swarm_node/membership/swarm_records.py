"""The records of the swarm at this node: read, kept and passed on.

Owns how the parts are put together: the book, its reader, and the answers to peers that ask. Decides nothing about
layers; `swarm_view` says what the records mean for this node.
"""

from __future__ import annotations

import os
import random

from swarm.codec import Buffer
from swarm.config import NodeConfig, state_dir
from swarm.gossip_messages import Records, RecordsQuery
from swarm.messages import AnyMessage
from swarm.net.base.tasks import TaskSet
from swarm.net.gossip.policy import GossipPolicy
from swarm.net.gossip.record_answers import RecordAnswers
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordChannel, RecordExchange
from swarm.net.gossip.record_file import RecordFile
from swarm.net.gossip.record_reader import RecordReader
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.security.identity import verify
from swarm_node.network.connection import NodeNetwork

_PATIENT = GossipPolicy(directory_patience_s=3.0, first_without_directory=False)
"""A choice of layers must not miss another node's claim."""

_GOODBYE_S = 0.5


class SwarmRecords:
    """`reader.snapshot()` reads; `keep_own` a new record of ours; `on_frame` of the pool. Close it before the pool."""

    def __init__(
        self, network: NodeNetwork, pool: ConnectionPool, config: NodeConfig, model: str, num_layers: int
    ) -> None:
        self._wall_clock = network.wall_clock
        self._tasks = TaskSet("record answers")
        self._book = RecordBook(
            model, num_layers, verify, random.Random(os.urandom(16)), own=pool.peer, is_connected=pool.has_dialled
        )
        self._exchange = RecordExchange()
        self.reader = RecordReader(
            self._book,
            network.directory,
            pool,
            self._exchange,
            bootstrap=config.peers,
            wall_clock=network.wall_clock,
            file=record_file(config) if network.remembers else None,
            policy=_PATIENT,
        )
        self._answers = RecordAnswers(self._book, self._tasks, network.wall_clock, self.reader.examine_soon)

    def keep_own(self, record: bytes) -> None:
        """Our newest record, from now on told to all that we ask and that ask us."""
        self._book.keep_own(record, self._wall_clock())

    async def tell_goodbye(self) -> None:
        """Tell our newest record to the peers that we talk to. Best effort, and short."""
        await self.reader.tell(_GOODBYE_S)

    def is_known(self) -> bool:
        """Whether a peer has been told our record, even if the directory has not."""
        return self.reader.has_been_heard

    def on_frame(self, link: RecordChannel, message: AnyMessage, body: Buffer) -> bool:
        """Whether it was about records. Raises ProtocolError."""
        match message:
            case RecordsQuery():
                self._answers.on_query(link, message, body)
            case Records():
                self._exchange.on_records(link.peer, message, body)
            case _:
                return False
        return True

    async def close(self) -> None:
        await self.reader.close()
        await self._tasks.close()


def record_file(config: NodeConfig) -> RecordFile | None:
    """Where a node that was given peers keeps those that it knows; a swarm's first node has none to lose."""
    if not config.peers:
        return None
    return RecordFile.of(state_dir() / "records", config.model, config.peers, config.network, config.secret)
