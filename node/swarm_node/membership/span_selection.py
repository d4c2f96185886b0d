"""How a joining node comes to its layers: choose, publish the choice, load, and check that the choice is still valid.

Owns the debounce: a choice must be stable for a while before it counts. The rule is in `placement`, the loading in
`span_manager`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarm.config import NodeConfig
from swarm.planner.schemas import placement_request_json
from swarm.types import NodeProfile, Snapshot
from swarm_node.membership import placement
from swarm_node.membership.placement import Placement
from swarm_node.membership.policy import MembershipPolicy
from swarm_node.membership.span_manager import SpanManager
from swarm_node.owner.event_log import EventReporter

logger = logging.getLogger(__name__)

POLICY = MembershipPolicy()


class SpanSelector:
    """`profile()`: ours as it is now; `publish()` our record now."""

    def __init__(
        self,
        config: NodeConfig,
        reporter: EventReporter,
        spans: SpanManager,
        *,
        snapshot: Callable[[], Awaitable[Snapshot]],
        profile: Callable[[], NodeProfile],
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._reporter = reporter
        self._spans = spans
        self._snapshot = snapshot
        self._profile = profile
        self._publish = publish

    async def select(self) -> None:
        """Take layers and load them, again if others turn out to have chosen the same ones at the same moment.

        Raises NetworkError, ModelError, OutOfMemory.
        """
        while True:
            placed = await self._choose()
            await self._claim(placed)
            await self._spans.load()
            if self._config.layers or placement.still_valid(await self._snapshot(), self._profile()):
                return
            logger.warning("other nodes took layers %s at the same moment; choosing again", placed.span)
            await self._spans.unload()
            await self._publish()

    async def _choose(self) -> Placement:
        """The layers to take, once the choice is stable: then all that join now have seen each other."""
        snapshot = await self._snapshot()
        if self._config.layers:
            return placement.manual_span(self._config.layers, snapshot.num_layers)
        loop = asyncio.get_running_loop()
        begun = since = loop.time()
        choice = placement.choose(snapshot, self._profile())
        alone = not self._config.peers and len(snapshot.nodes) <= 1
        while not alone and loop.time() < min(begun + POLICY.max_selection_s, since + POLICY.stability_s):
            await asyncio.sleep(POLICY.selection_poll_s)
            before, choice = choice, placement.choose(await self._snapshot(), self._profile())
            if choice.span != before.span:
                since = loop.time()
        return choice

    async def _claim(self, placed: Placement) -> None:
        """Publish which layers we take, before we spend the time to load them."""
        self._spans.claim(placed.span)
        await self._publish()
        span, reason = placed.span, placed.reason
        seen = {} if placed.seen is None else {"request": placement_request_json(placed.seen)}
        self._reporter.event("placed", f"takes {reason}", start=span.start, end=span.end, reason=reason, **seen)
