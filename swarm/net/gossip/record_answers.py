"""Answers to peers that ask for records: within what each of them, and all of them together, may take.

Owns those allowances. What an answer contains is `RecordBook.answer`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from swarm import records
from swarm.codec import Buffer
from swarm.errors import ConnectionLost, ProtocolError
from swarm.gossip_messages import Records, RecordsQuery, unpack_listed
from swarm.net.base.tasks import TaskSet
from swarm.net.gossip.policy import AnswerPolicy
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordChannel
from swarm.token_bucket import TokenBucket
from swarm.types import PeerId

logger = logging.getLogger(__name__)


class _Asker:
    """What one peer has asked."""

    def __init__(self, policy: AnswerPolicy) -> None:
        self.allowance = TokenBucket(policy.per_peer_s, policy.per_peer_burst)
        self.ignored = 0
        self.sending = False


class RecordAnswers:
    """`on_query` is called for every RecordsQuery and never waits. `on_news()`: a peer has told us its own record.

    `wall_clock`: seconds since the epoch, as records are dated.
    """

    def __init__(
        self,
        book: RecordBook,
        tasks: TaskSet,
        wall_clock: Callable[[], float],
        on_news: Callable[[], None] = lambda: None,
        policy: AnswerPolicy = AnswerPolicy(),
    ) -> None:
        self._book = book
        self._tasks = tasks
        self._wall_clock = wall_clock
        self._on_news = on_news
        self._policy = policy
        self._askers: OrderedDict[PeerId, _Asker] = OrderedDict()
        self._work = TokenBucket(policy.records_per_s, policy.records_burst)
        half = policy.bytes_per_s / 2
        self._known_bytes, self._strangers_bytes = TokenBucket(half, 4 * half), TokenBucket(half, 4 * half)

    def on_query(self, link: RecordChannel, query: RecordsQuery, body: Buffer = b"") -> None:
        """Raises ProtocolError."""
        if len(body):
            raise ProtocolError("a question for records with a body")
        if query.slice >= query.slices:
            raise ProtocolError(f"slice {query.slice} of {query.slices}")
        now = self._wall_clock()
        asker = self._asker(link.peer)
        if not asker.allowance.take(1.0, now):
            asker.ignored += 1
            if asker.ignored > self._policy.max_ignored:
                raise ProtocolError("too many questions for records")
            return
        asker.ignored = 0
        if query.model != self._book.model:
            self._send(link, asker, Records(query.nonce))
            return
        if query.own:
            if records.claim(query.own)[0] != link.peer:
                raise ProtocolError("another peer's record as its own")
            self._book.offer(query.own, link.peer)
            self._on_news()
        if asker.sending or not self._work.take(len(self._book) + self._policy.cost_of_answer, now):
            return
        found, more = self._book.answer(unpack_listed(query.listed), query.slice, query.slices, now)
        size = sum(map(len, found))
        budget = self._strangers_bytes if self._book.record_of(link.peer) is None else self._known_bytes
        if not budget.take(size, now):
            return
        self._send(link, asker, Records(query.nonce, found, more))

    def _asker(self, peer: PeerId) -> _Asker:
        asker = self._askers.pop(peer, None) or _Asker(self._policy)
        self._askers[peer] = asker
        if len(self._askers) > self._policy.max_peers:
            self._askers.popitem(last=False)
        return asker

    def _send(self, link: RecordChannel, asker: _Asker, answer: Records) -> None:
        if not asker.sending:
            asker.sending = True
            self._tasks.start(self._send_answer(link, asker, answer), f"records for {link.peer}")

    async def _send_answer(self, link: RecordChannel, asker: _Asker, answer: Records) -> None:
        try:
            async with asyncio.timeout(self._policy.send_timeout_s):
                await link.send(answer)
        except (ConnectionLost, TimeoutError):
            logger.debug("%s did not read the records that it asked for", link.peer)
        finally:
            asker.sending = False
