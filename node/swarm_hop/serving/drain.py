"""Draining: how sessions end before a node leaves, pauses or gives up layers, without losing an answer.

Owns the order: others take over the layers, if they can; short sessions end by themselves; those whose layers others
serve by now are evicted (their clients replay them onto the replacement); the rest may finish within a time limit.
Uses neither frames nor the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from swarm.errors import NetworkError, NodeLeaving
from swarm.types import LayerSpan
from swarm_hop.serving.policy import DrainPolicy
from swarm_hop.serving.served_spans import ServedSpan
from swarm_hop.serving.session_server import SessionServer

logger = logging.getLogger(__name__)

POLICY = DrainPolicy()

CoverageCheck = Callable[[], Awaitable[Callable[[LayerSpan], bool]]]
"""-> whether other nodes serve all of these layers now. Raises NetworkError."""


async def wait_for_takeover(
    span: LayerSpan, covered_elsewhere: CoverageCheck, replaceable: Callable[[], Awaitable[bool]], within_s: float
) -> bool:
    """Wait until other nodes serve `span`; False if they cannot, or do not in time.

    Call it once our record is LEAVING: others exclude us from then on and move into the gap that they see, and of
    several that leave at the same moment the last to publish it sees that the rest are departing.
    """
    with contextlib.suppress(TimeoutError, NetworkError):
        async with asyncio.timeout(within_s):
            while not (await covered_elsewhere())(span):
                if not await replaceable():
                    return False
                await asyncio.sleep(POLICY.poll_s)
            return True
    return False


async def drain_sessions(
    server: SessionServer,
    why: NodeLeaving,
    covered_elsewhere: CoverageCheck,
    *,
    served_span: ServedSpan | None = None,
    grace_s: float = POLICY.grace_s,
    within_s: float | None = None,
) -> int:
    """Return when no session (of `served_span`) is left; how many were cut off after `within_s`. None: wait for all."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while not server.idle(served_span):
        waited_s = loop.time() - started
        if within_s is not None and waited_s >= within_s:
            return server.evict(why, lambda span: True, served_span)
        if waited_s >= grace_s:
            try:
                server.evict(why, await covered_elsewhere(), served_span)
            except NetworkError as error:
                logger.info("cannot read who else serves our layers: %s", error)
        await server.wait_idle(served_span, POLICY.poll_s)
    return 0
