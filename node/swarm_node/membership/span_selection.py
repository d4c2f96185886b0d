"""How a joining node comes to its layers: choose, publish the choice, load, and check that the choice is still valid.

Owns the debounce: a choice must be stable for a while before it counts. The rule is in `placement`, the loading in
`span_manager`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swarm.config import NodeConfig
from swarm.planner.placement.experts import is_spare
from swarm.planner.schemas import placement_request_json
from swarm.types import NodeProfile, Snapshot
from swarm_node.membership import placement
from swarm_node.membership.placement import Mixtures, Placement
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
        mixtures: Mixtures = Mixtures(),
    ) -> None:
        self._config = config
        self._reporter = reporter
        self._spans = spans
        self._snapshot = snapshot
        self._profile = profile
        self._publish = publish
        self._mixtures = mixtures

    async def select(self) -> None:
        """Take layers and load them, again if others turn out to have chosen the same ones at the same moment.

        Raises NetworkError, ModelError, OutOfMemory.
        """
        while True:
            placed = await self._choose()
            await self._claim(placed)
            await self._spans.load()
            if self._config.layers or self._is_valid(await self._snapshot()):
                return
            logger.warning("other nodes took %s at the same moment; choosing again", placed.share or placed.span)
            await self._spans.unload()
            await self._publish()

    async def _choose(self) -> Placement:
        """The layers to take, once the choice is stable: then all that join now have seen each other."""
        snapshot = await self._snapshot()
        by_hand = placement.manual(self._config, snapshot.num_layers, self._mixtures.count)
        if by_hand is not None:
            return by_hand
        loop = asyncio.get_running_loop()
        begun = since = loop.time()
        choice = self._of(snapshot)
        alone = not self._config.peers and len(snapshot.nodes) <= 1
        while not alone and loop.time() < min(begun + POLICY.max_selection_s, since + POLICY.stability_s):
            await asyncio.sleep(POLICY.selection_poll_s)
            before, choice = choice, self._of(await self._snapshot())
            if (choice.span, choice.share) != (before.span, before.share):
                since = loop.time()
        return choice

    def _of(self, snapshot: Snapshot) -> Placement:
        me = self._profile()
        return (
            placement.choose(snapshot, me)
            if me.layer_capacity
            else placement.choose_share(snapshot, me, self._mixtures)
        )

    def _is_valid(self, snapshot: Snapshot) -> bool:
        me = self._profile()
        if me.experts is None:
            return placement.still_valid(snapshot, me)
        return not is_spare(placement.with_holders(snapshot, me), me, self._mixtures.count)

    async def _claim(self, placed: Placement) -> None:
        """Publish which layers we take, before we spend the time to load them."""
        self._spans.claim(placed.span, placed.share)
        await self._publish()
        reason, seen = placed.reason, {}
        if placed.seen is not None:
            seen["request"] = placement_request_json(placed.seen)
        span = placed.span or (placed.share.layers if placed.share is not None else None)
        assert span is not None  # a node takes layers, or experts of some
        held = {} if placed.share is None else {"experts": [placed.share.first, placed.share.end]}
        self._reporter.event("placed", f"takes {reason}", start=span.start, end=span.end, reason=reason, **held, **seen)
