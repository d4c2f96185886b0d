"""KV transfer: the KV cache of a session that continues at another node, recurrent states included, is fetched from the
node that had it.

Owns the requests in flight and their limits. When a transfer fails, the previous hop replays its activations instead.
Uses neither routes nor the reason why a session moved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import InvalidRequest, NetworkError, PeerUnreachable, ProtocolError, SwarmError
from swarm.messages import MAX_KV_BLOCKS, KvBlocks, KvFetch, SessionFailed
from swarm.net.base.tasks import TaskSet, run_all
from swarm.types import KvSource, PeerId
from swarm_hop.serving.hop_dialer import HopDialer
from swarm_hop.serving.policy import SessionPolicy
from swarm_hop.serving.quotas import Quotas
from swarm_hop.serving.served_spans import ServedSpan
from swarm_hop.serving.session import HopSession, PeerChannel

logger = logging.getLogger(__name__)

_Key = tuple[bytes, int, int]  # session, layer, first block


class KvTransfer:
    """One a node."""

    def __init__(
        self,
        dialer: HopDialer,
        limits: Limits,
        quotas: Quotas,
        scope: TaskSet,
        policy: SessionPolicy = SessionPolicy(),
    ) -> None:
        self._policy = policy
        self._dialer = dialer
        self._limits = limits
        self._quotas = quotas
        self._scope = scope
        self._expected: dict[_Key, tuple[PeerId, asyncio.Future[Buffer]]] = {}

    # Source ----------------------------------------------------------------------------------------------------------

    def serve(self, link: PeerChannel, session: HopSession, served_span: ServedSpan, fetch: KvFetch) -> None:
        """Send the blocks from a task. Raises ProtocolError for blocks that the session does not have."""
        engine = served_span.engine
        within = (
            session.span.start <= fetch.layer < session.span.end
            and fetch.tokens <= session.committed
            and fetch.first_block + fetch.num_blocks <= engine.transfer_units(fetch.layer, fetch.tokens)
        )
        if not within or fetch.num_blocks > self._units_per_chunk(engine.unit_bytes(fetch.layer)):
            raise ProtocolError(
                f"layer {fetch.layer} of {fetch.tokens} tokens has no {fetch.num_blocks} blocks for a frame"
            )
        if self._quotas.take_reply(link.peer):
            self._scope.start(self._serve(link, session, served_span, fetch), f"KV blocks for {link.peer}")

    async def _serve(self, link: PeerChannel, session: HopSession, served_span: ServedSpan, fetch: KvFetch) -> None:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                read = served_span.engine.reader(session.key, fetch.tokens)
                body = await served_span.executor.run_exclusive(
                    partial(read, fetch.layer, fetch.first_block, fetch.num_blocks)
                )
                await link.send(KvBlocks(session.id, fetch.layer, fetch.first_block), body)
        except (TimeoutError, SwarmError) as error:
            logger.debug("%s does not get its KV blocks: %s", link.peer, error)
        finally:
            self._quotas.give_reply(link.peer)

    # Target ----------------------------------------------------------------------------------------------------------

    async def fetch(self, session: HopSession, served_span: ServedSpan, source: KvSource) -> bool:
        """Fetch the first tokens of `session` from `source`. False, and nothing has changed, if that fails."""
        try:
            async with asyncio.timeout(self._policy.kv_transfer_timeout_s):
                link = await self._dialer.get(session.client.peer, source.peer)
                served_span.engine.import_blocks(session.key, source.tokens)
                await self._fetch_all(link, session, served_span, source)
        except (TimeoutError, NetworkError, InvalidRequest) as error:
            logger.info("session %s: no KV transfer from %s: %s", session.id.hex(), source.peer, error)
            served_span.engine.rollback(session.key, 0)
            return False
        session.start_from(source.tokens)
        served_span.computed(session.key, source.tokens)
        return True

    async def _fetch_all(
        self, link: PeerChannel, session: HopSession, served_span: ServedSpan, source: KvSource
    ) -> None:
        """Raises NetworkError; InvalidRequest for bytes that are no state."""
        tokens = source.tokens
        engine = served_span.engine
        write = engine.writer(session.key, tokens, session.span)
        in_flight = asyncio.Semaphore(self._policy.kv_requests_in_flight)

        async def fetch(layer: int, block: int, count: int) -> None:
            async with in_flight:
                body = await self._request(link, KvFetch(session.id, layer, block, count, tokens, source.token))
                if len(memoryview(body)) != count * engine.unit_bytes(layer):
                    raise PeerUnreachable(f"{link.peer} sent {len(memoryview(body))} bytes for {count} blocks")
                await served_span.executor.run_exclusive(partial(write, layer, block, bytes(body)))

        await run_all(fetch(*chunk) for chunk in self._chunks(session, served_span, tokens))
        write.finish()

    async def _request(self, link: PeerChannel, fetch: KvFetch) -> Buffer:
        key = fetch.session, fetch.layer, fetch.first_block
        reply: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        self._expected[key] = link.peer, reply
        try:
            await link.send(fetch)
            return await reply
        finally:
            del self._expected[key]

    def on_blocks(self, peer: PeerId, blocks: KvBlocks, body: Buffer) -> None:
        """Raises ProtocolError for blocks that were requested from another peer; late ones are dropped."""
        expected = self._expected.get((blocks.session, blocks.layer, blocks.first_block))
        if expected is None:
            return
        if expected[0] != peer:
            raise ProtocolError("KV blocks that were requested from another peer")
        if not expected[1].done():
            expected[1].set_result(body)

    def on_failed(self, peer: PeerId, failed: SessionFailed) -> None:
        """`peer` has dropped the session."""
        for (session, _, _), (source, reply) in self._expected.items():
            if session == failed.session and source == peer and not reply.done():
                reply.set_exception(PeerUnreachable(f"{peer} has dropped the session: {failed.detail}"))

    def _units_per_chunk(self, unit_bytes: int) -> int:
        return min(MAX_KV_BLOCKS, max(1, self._policy.kv_chunk_bytes // unit_bytes))

    def _chunks(self, session: HopSession, served_span: ServedSpan, tokens: int) -> Iterator[tuple[int, int, int]]:
        """(layer, first unit, number of units)"""
        engine = served_span.engine
        for layer in engine.distinct_layers(session.span):
            units, most = engine.transfer_units(layer, tokens), self._units_per_chunk(engine.unit_bytes(layer))
            for unit in range(0, units, most):
                yield layer, unit, min(most, units - unit)
