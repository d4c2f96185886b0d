"""One model's swarm, watched for all its readers: one poller while anybody reads, each event encoded once.

Owns the poller and the readers. A reader that is too slow for the events skips them and gets the whole overview again,
so nothing is kept for it without bound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from swarm.errors import SwarmError
from swarm.net.base.tasks import TaskSet
from swarm.overview import AnswerOverview, SwarmOverview, changes
from swarm.types import Snapshot
from swarm_gateway.errors import ApiError
from swarm_gateway.streaming.sse import event
from swarm_gateway.swarm_view.answers import AnswerBoard

logger = logging.getLogger(__name__)

PERIOD_S = 1.0  # between two changes
MAX_READERS = 64  # of one model
MAX_QUEUED = 8  # events that wait for one reader


class SnapshotSource(Protocol):
    """What is asked of a SwarmClient."""

    async def snapshot(self) -> Snapshot: ...


class _Reader:
    """Events that wait for one reader. `behind`: they were too many, or it has seen none yet."""

    def __init__(self) -> None:
        self.behind = True
        self.queue: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def push(self, frame: bytes) -> None:
        if len(self.queue) >= MAX_QUEUED:
            self.behind = True
        if self.behind:
            self.queue.clear()
        else:
            self.queue.append(frame)
        self._wake.set()

    async def wait(self) -> None:
        while not (self.queue or self.behind):
            self._wake.clear()
            await self._wake.wait()


class SwarmWatch:
    """`model`: its name in the gateway. `wall_clock`: seconds since the epoch. Close it before the source."""

    def __init__(
        self,
        model: str,
        source: SnapshotSource,
        board: AnswerBoard,
        *,
        wall_clock: Callable[[], float] = time.time,
        period_s: float = PERIOD_S,
    ) -> None:
        self._model = model
        self._source = source
        self._board = board
        self._wall_clock = wall_clock
        self._period_s = period_s
        self._readers: set[_Reader] = set()
        self._told: SwarmOverview | None = None  # what the readers know; None while nobody reads
        self._whole: bytes | None = None  # `_told`, encoded
        self._tasks = TaskSet(f"watch of {model}")
        self._poller: asyncio.Task[None] | None = None

    @property
    def readers(self) -> int:
        return len(self._readers)

    async def close(self) -> None:
        await self._tasks.close()

    async def overview(self) -> SwarmOverview:
        """The swarm as it is now. Raises ApiError: the directory cannot be read."""
        try:
            snapshot = await self._source.snapshot()
        except SwarmError as error:
            raise ApiError.of(error) from error
        seen = SwarmOverview.of(snapshot, self._wall_clock(), self._board.of(self._model))
        return msgspec.structs.replace(seen, model=self._model)

    async def admit(self) -> None:
        """Before `events`, while a request can still be refused. Raises ApiError: too many readers, or no swarm."""
        if len(self._readers) >= MAX_READERS:
            raise ApiError(429, "rate_limited", f"{MAX_READERS} readers watch this swarm already", retry_after_s=10.0)
        if self._told is None:
            await self.overview()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `overview`, then `change` and `answer`, until the reader closes it. Ends at once if there
        are too many readers."""
        if len(self._readers) >= MAX_READERS:
            return
        reader = _Reader()
        self._readers.add(reader)
        try:
            if self._told is None:
                first = await self.overview()
                self._tell(self._told or first)  # another reader may have been quicker
            if self._poller is None:
                self._poller = self._tasks.start(self._poll(), "poller")
                self._board.listen(self._on_answer)
            while True:
                await reader.wait()
                if reader.behind:
                    reader.behind = False
                    reader.queue.clear()
                    yield self._encoded_whole()
                else:
                    yield reader.queue.popleft()
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._stop()

    def _stop(self) -> None:
        self._told = self._whole = None
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None
            self._board.unlisten(self._on_answer)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                current = await self.overview()
            except ApiError as error:
                logger.info("the swarm of %s cannot be read now: %s", self._model, error)
                continue
            assert self._told is not None  # the first reader set it
            change = changes(self._told, current)
            self._tell(self._told.apply(change))
            self._push(event("change", change))

    def _tell(self, told: SwarmOverview) -> None:
        self._told, self._whole = told, None

    def _encoded_whole(self) -> bytes:
        if self._whole is None:
            self._whole = event("overview", self._told)
        return self._whole

    def _on_answer(self, answer: AnswerOverview) -> None:
        if answer.model == self._model:
            self._push(event("answer", answer))

    def _push(self, frame: bytes) -> None:
        for reader in self._readers:
            reader.push(frame)
