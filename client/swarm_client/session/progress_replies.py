"""The hops' replies to one progress query of a session, and since when none of them has made progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence

from swarm.messages import ProgressReport
from swarm.types import PeerId
from swarm_client.health.stall_locator import HopProgress, StallTimer, stalled_hops


class ProgressReplies:
    """`begin` with every query, `add` with every reply."""

    def __init__(self) -> None:
        self._replies: dict[PeerId, HopProgress] = {}
        self._complete = asyncio.Event()  # all hops have replied
        self._timer = StallTimer()

    def begin(self) -> None:
        self._replies.clear()
        self._complete.clear()

    def add(self, peer: PeerId, report: ProgressReport, peers: Collection[PeerId]) -> None:
        """`peers`: those that are asked."""
        self._replies[peer] = HopProgress(report.received, report.completed, report.compute_ms)
        if self._replies.keys() >= set(peers):
            self._complete.set()

    async def wait(self, timeout_s: float) -> Mapping[PeerId, HopProgress]:
        """Of all hops, or of those that reply in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        return dict(self._replies)

    def stalled(
        self, peers: Sequence[PeerId], progress: Mapping[PeerId, HopProgress], step: int
    ) -> tuple[tuple[PeerId, ...], float]:
        """See `InferenceSession.stalled_hops`; `step`: the last that was sent."""
        lasted_s = self._timer.lasted_s(progress, asyncio.get_running_loop().time())
        return stalled_hops(peers, progress, step), lasted_s
