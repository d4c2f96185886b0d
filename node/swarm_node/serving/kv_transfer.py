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
from swarm.messages import MAX_KV_BLOCKS, KvBlocks, KvFetch, SessionFailed
from swarm.net.base.tasks import TaskSet
from swarm.net.pool.violations import ProtocolViolations
from swarm.types import KvSource, PeerId
from swarm_node.serving.quotas import Quotas
from swarm_node.serving.served_spans import ServedSpan
from swarm_node.serving.session import HopSession, PeerChannel

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # of one answer
AHEAD = 4  # requests on their way
TAKE_S = 5.0  # for all of it

_Key = tuple[bytes, int, int]  # session, layer, first page


class ConnectionSource(Protocol):
    """The connections of this node, as `net.pool` keeps them."""

    violations: ProtocolViolations

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> PeerChannel:
        """Raises PeerUnreachable, after `timeout_s` at the latest."""
        ...


class KvTransfer:
    """One a node."""

    def __init__(self, pool: ConnectionSource, limits: Limits, quotas: Quotas, scope: TaskSet) -> None:
        self._pool = pool
        self._limits = limits
        self._quotas = quotas
        self._scope = scope
        self._expected: dict[_Key, tuple[PeerId, asyncio.Future[Buffer]]] = {}

    # The one that leaves ---------------------------------------------------------------------------------------------

    def serve(self, link: PeerChannel, session: HopSession, home: ServedSpan, fetch: KvFetch) -> None:
        """Answer in good time. Raises ProtocolError for what the session does not have."""
        engine = home.engine
        pages = -(-fetch.tokens // engine.block_tokens)
        within = session.span.start <= fetch.layer < session.span.end and fetch.first_block + fetch.num_blocks <= pages
        if not within or fetch.tokens > session.committed or fetch.num_blocks > _pages_a_chunk(engine.block_bytes):
            raise ProtocolError(
                f"layer {fetch.layer} of {fetch.tokens} tokens has no {fetch.num_blocks} pages for a frame"
            )
        if self._quotas.take_reply(link.peer):
            self._scope.start(self._serve(link, session, home, fetch), f"pages for {link.peer}")

    async def _serve(self, link: PeerChannel, session: HopSession, home: ServedSpan, fetch: KvFetch) -> None:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                read = home.engine.reader(session.key, fetch.tokens)
                body = await home.executor.run_exclusive(
                    partial(read, fetch.layer, fetch.first_block, fetch.num_blocks)
                )
                await link.send(KvBlocks(session.id, fetch.layer, fetch.first_block), body)
        except (TimeoutError, SwarmError) as error:
            logger.debug("%s does not get its pages: %s", link.peer, error)
        finally:
            self._quotas.give_reply(link.peer)

    # The one that comes ----------------------------------------------------------------------------------------------

    async def fetch(self, session: HopSession, home: ServedSpan, legacy: KvSource) -> bool:
        """Fetch what `session` begins with. False, and nothing has changed, if it is not to be had."""
        try:
            async with asyncio.timeout(TAKE_S):
                link = await self._pool.get(legacy.peer, legacy.addresses, self._limits.next_hop_dial_timeout_s)
                home.engine.import_blocks(session.key, legacy.tokens)
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

    async def _fetch_all(self, link: PeerChannel, session: HopSession, home: ServedSpan, tokens: int) -> None:
        """Raises NetworkError, or several as a group."""
        write = home.engine.writer(session.key, tokens)
        gate = asyncio.Semaphore(AHEAD)

        async def fetch(layer: int, page: int, count: int) -> None:
            async with gate:
                body = await self._ask(link, KvFetch(session.id, layer, page, count, tokens))
                if len(memoryview(body)) != count * home.engine.block_bytes:
                    raise PeerUnreachable(f"{link.peer} sent {len(memoryview(body))} bytes for {count} pages")
                await home.executor.run_exclusive(partial(write, layer, page, bytes(body)))

        async with asyncio.TaskGroup() as group:
            for layer, page, count in _chunks(session, home, tokens):
                group.create_task(fetch(layer, page, count))

    async def _ask(self, link: PeerChannel, fetch: KvFetch) -> Buffer:
        key = fetch.session, fetch.layer, fetch.first_block
        answer: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        self._expected[key] = link.peer, answer
        try:
            await link.send(fetch)
            return await answer
        finally:
            del self._expected[key]

    def on_blocks(self, peer: PeerId, pages: KvBlocks, body: Buffer) -> None:
        """Raises ProtocolError for what nobody asked `peer` for; what comes too late is dropped."""
        expected = self._expected.get((pages.session, pages.layer, pages.first_block))
        if expected is None:
            return
        if expected[0] != peer:
            raise ProtocolError("keys and values that somebody else was asked for")
        if not expected[1].done():
            expected[1].set_result(body)

    def on_failed(self, peer: PeerId, failed: SessionFailed) -> None:
        """`peer` does not have the session any more."""
        for (session, _, _), (asked, answer) in self._expected.items():
            if session == failed.session and asked == peer and not answer.done():
                answer.set_exception(PeerUnreachable(f"{peer} has nothing of it left: {failed.detail}"))


def _pages_a_chunk(page_bytes: int) -> int:
    return min(MAX_KV_BLOCKS, max(1, CHUNK_BYTES // page_bytes))


def _chunks(session: HopSession, home: ServedSpan, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(layer, first page, pages)"""
    pages, most = -(-tokens // home.engine.block_tokens), _pages_a_chunk(home.engine.block_bytes)
    for layer in session.span:
        for page in range(0, pages, most):
            yield layer, page, min(most, pages - page)
