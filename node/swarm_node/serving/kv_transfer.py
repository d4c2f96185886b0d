"""Keys and values of a session that goes on at another node: the one that leaves gives them, the one that comes asks.

Owns the requests that are under way and their limits. A node that cannot have them says so and is fed by the hop before
it. Knows neither routes nor why sessions move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import InvalidRequest, NetworkError, PeerUnreachable, ProtocolError, SwarmError
from swarm.messages import MAX_PAGES, Failed, Fetch, Pages
from swarm.net.base.tasks import TaskScope
from swarm.net.pool.violations import ProtocolViolations
from swarm.types import Legacy, PeerId
from swarm_node.serving.quotas import Quotas
from swarm_node.serving.served_spans import Home
from swarm_node.serving.session import Link, Session

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # of one answer
AHEAD = 4  # requests on their way
TAKE_S = 5.0  # for all of it

_Key = tuple[bytes, int, int]  # session, layer, first page


class Pool(Protocol):
    """The connections of this node, as `net.pool` keeps them."""

    violations: ProtocolViolations

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> Link:
        """Raises PeerUnreachable, after `timeout_s` at the latest."""
        ...


class Handover:
    """One a node."""

    def __init__(self, pool: Pool, limits: Limits, quotas: Quotas, scope: TaskScope) -> None:
        self._pool = pool
        self._limits = limits
        self._quotas = quotas
        self._scope = scope
        self._expected: dict[_Key, tuple[PeerId, asyncio.Future[Buffer]]] = {}

    # The one that leaves ---------------------------------------------------------------------------------------------

    def give(self, link: Link, session: Session, home: Home, fetch: Fetch) -> None:
        """Answer in good time. Raises ProtocolError for what the session does not have."""
        engine = home.engine
        pages = -(-fetch.tokens // engine.page_tokens)
        within = session.span.start <= fetch.layer < session.span.end and fetch.page + fetch.count <= pages
        if not within or fetch.tokens > session.committed or fetch.count > _pages_a_chunk(engine.page_bytes):
            raise ProtocolError(f"layer {fetch.layer} of {fetch.tokens} tokens has no {fetch.count} pages for a frame")
        if self._quotas.take_answer(link.peer):
            self._scope.start(self._give(link, session, home, fetch), f"pages for {link.peer}")

    async def _give(self, link: Link, session: Session, home: Home, fetch: Fetch) -> None:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                read = home.engine.reader(session.key, fetch.tokens)
                body = await home.executor.run_exclusive(partial(read, fetch.layer, fetch.page, fetch.count))
                await link.send(Pages(session.id, fetch.layer, fetch.page), body)
        except (TimeoutError, SwarmError) as error:
            logger.debug("%s does not get its pages: %s", link.peer, error)
        finally:
            self._quotas.give_answer(link.peer)

    # The one that comes ----------------------------------------------------------------------------------------------

    async def take(self, session: Session, home: Home, legacy: Legacy) -> bool:
        """Fetch what `session` begins with. False, and nothing has changed, if it is not to be had."""
        try:
            async with asyncio.timeout(TAKE_S):
                link = await self._pool.get(legacy.peer, legacy.addresses, self._limits.next_hop_dial_timeout_s)
                home.engine.adopt(session.key, legacy.tokens)
                await self._fetch_all(link, session, home, legacy.tokens)
        except (TimeoutError, NetworkError, InvalidRequest, ExceptionGroup) as error:
            if isinstance(error, ExceptionGroup) and error.split(NetworkError)[1] is not None:
                raise
            logger.info("session %s inherits nothing of %s: %s", session.id.hex(), legacy.peer, error)
            home.engine.rollback(session.key, 0)
            return False
        session.start_from(legacy.tokens)
        home.computed(session.key, legacy.tokens)
        return True

    async def _fetch_all(self, link: Link, session: Session, home: Home, tokens: int) -> None:
        """Raises NetworkError, or several as a group."""
        write = home.engine.writer(session.key, tokens)
        gate = asyncio.Semaphore(AHEAD)

        async def fetch(layer: int, page: int, count: int) -> None:
            async with gate:
                body = await self._ask(link, Fetch(session.id, layer, page, count, tokens))
                if len(memoryview(body)) != count * home.engine.page_bytes:
                    raise PeerUnreachable(f"{link.peer} sent {len(memoryview(body))} bytes for {count} pages")
                await home.executor.run_exclusive(partial(write, layer, page, bytes(body)))

        async with asyncio.TaskGroup() as group:
            for layer, page, count in _chunks(session, home, tokens):
                group.create_task(fetch(layer, page, count))

    async def _ask(self, link: Link, fetch: Fetch) -> Buffer:
        key = fetch.session, fetch.layer, fetch.page
        answer: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        self._expected[key] = link.peer, answer
        try:
            await link.send(fetch)
            return await answer
        finally:
            del self._expected[key]

    def arrived(self, peer: PeerId, pages: Pages, body: Buffer) -> None:
        """Raises ProtocolError for what nobody asked `peer` for; what comes too late is dropped."""
        expected = self._expected.get((pages.session, pages.layer, pages.page))
        if expected is None:
            return
        if expected[0] != peer:
            raise ProtocolError("keys and values that somebody else was asked for")
        if not expected[1].done():
            expected[1].set_result(body)

    def refused(self, peer: PeerId, failed: Failed) -> None:
        """`peer` does not have the session any more."""
        for (session, _, _), (asked, answer) in self._expected.items():
            if session == failed.session and asked == peer and not answer.done():
                answer.set_exception(PeerUnreachable(f"{peer} has nothing of it left: {failed.detail}"))


def _pages_a_chunk(page_bytes: int) -> int:
    return min(MAX_PAGES, max(1, CHUNK_BYTES // page_bytes))


def _chunks(session: Session, home: Home, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(layer, first page, pages)"""
    pages, most = -(-tokens // home.engine.page_tokens), _pages_a_chunk(home.engine.page_bytes)
    for layer in session.span:
        for page in range(0, pages, most):
            yield layer, page, min(most, pages - page)
