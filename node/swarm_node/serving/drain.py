"""How sessions come to their end before a node leaves, pauses or gives up layers: nobody's answer is lost.

Owns the order: others take over the layers, if they can; short sessions end by themselves; those whose layers others
serve by now are sent there (their clients replay them onto the replacement); the rest may finish within a time limit.
Knows neither frames nor the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from swarm.errors import NetworkError, NodeLeaving
from swarm.types import LayerSpan
from swarm_node.serving.served_spans import ServedSpan
from swarm_node.serving.session_server import SessionServer

logger = logging.getLogger(__name__)

GRACE_S = 2.0  # in which short sessions end by themselves
CHECK_S = 0.5

CoverageCheck = Callable[[], Awaitable[Callable[[LayerSpan], bool]]]
"""-> whether other nodes serve all of these layers now. Raises NetworkError."""


async def wait_for_takeover(
    span: LayerSpan, elsewhere: CoverageCheck, replaceable: Callable[[], Awaitable[bool]], within_s: float
) -> bool:
    """Wait until other nodes serve `span`; False if they cannot, or do not in time.

    Call it once our record says LEAVING: others count us out from then on and move into the gap that they see, and of
    several that leave at the same moment the last to have said so sees that the rest are going.
    """
    with contextlib.suppress(TimeoutError, NetworkError):
        async with asyncio.timeout(within_s):
            while not (await elsewhere())(span):
                if not await replaceable():
                    return False
                await asyncio.sleep(CHECK_S)
            return True
    return False


async def drain_sessions(
    service: SessionServer,
    why: NodeLeaving,
    elsewhere: CoverageCheck,
    *,
    home: ServedSpan | None = None,
    grace_s: float = GRACE_S,
    within_s: float | None = None,
) -> int:
    """Return when no session (of `home`) is left; how many were cut off after `within_s`. None: wait for all."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while not service.idle(home):
        waited_s = loop.time() - begun
        if within_s is not None and waited_s >= within_s:
            return service.evict(why, lambda span: True, home)
        if waited_s >= grace_s:
            try:
                service.evict(why, await elsewhere(), home)
            except NetworkError as error:
                logger.info("cannot tell who else serves our layers: %s", error)
        await service.wait_idle(home, CHECK_S)
    return 0
