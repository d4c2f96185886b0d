"""What is kept of responses, in memory: to be asked for by id, and to be continued from. Owns the bounds: each key has
so many responses, bytes and hours of its own, so no caller pushes out what another one keeps."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from swarm_gateway.errors import ApiError
from swarm_gateway.responses.answers import ResponseAnswer, StreamEvent
from swarm_gateway.responses.items import Item
from swarm_gateway.streaming.sse import event


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """Of one key."""

    max_responses: int = 512
    max_bytes: int = 64 << 20  # of items and kept events; those of running answers come on top while they run
    max_age_s: float = 24 * 3600.0


@dataclass(eq=False)
class StoredResponse:
    """`conversation`: what the answer was made of, in canonical form. `frames`: its stream so far, number i at place i;
    of answers in the background only. `task`: writes the answer, in the background."""

    answer: ResponseAnswer
    conversation: tuple[Item, ...]
    frames: list[bytes] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    stored_at: float | None = None
    size: int = 0  # bytes
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def measure(self) -> None:
        items = len(msgspec.json.encode(self.conversation)) + len(msgspec.json.encode(self.answer.response()))
        self.size = items + sum(map(len, self.frames))

    def keep(self, events: list[StreamEvent]) -> None:
        """Events for those who follow."""
        self.frames += [event(each["type"], each) for each in events]
        self._wake()

    def end(self) -> None:
        """No more events will come."""
        self.measure()
        self._wake()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Frames from number `first` on, until the answer has ended."""
        while True:
            more = self._more
            while first < len(self.frames):
                yield self.frames[first]
                first += 1
            if self.answer.done:
                return
            await more.wait()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class ResponseStore:
    """Responses by the key that made them and by id. `clock`: seconds, monotonic."""

    def __init__(self, policy: StorePolicy | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy or StorePolicy()
        self._clock = clock
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}

    def put(self, owner: str, stored: StoredResponse) -> None:
        """The oldest finished ones make room. Raises ApiError 429 if running ones fill it all."""
        stored.measure()
        stored.stored_at = self._clock()
        mine = self._kept.setdefault(owner, OrderedDict())
        self._make_room(mine, stored)
        mine[stored.answer.id] = stored

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """Raises ApiError 404, the same for an id of another key and for one that never was."""
        mine = self._kept.get(owner, OrderedDict())
        self._forget_old(mine)
        stored = mine.get(response_id)
        if stored is None:
            sentence = f"there is no response {response_id[:100]!r}; it was never stored, or has made room for others"
            raise ApiError(404, "not_found", sentence, param="response_id")
        return stored

    def remove(self, owner: str, response_id: str) -> StoredResponse:
        """Raises ApiError 404."""
        stored = self.get(owner, response_id)
        del self._kept[owner][response_id]
        return stored

    def _forget_old(self, mine: OrderedDict[str, StoredResponse]) -> None:
        oldest = self._clock() - self.policy.max_age_s
        for response_id in [id_ for id_, kept in mine.items() if (kept.stored_at or 0.0) < oldest and kept.answer.done]:
            del mine[response_id]

    def _make_room(self, mine: OrderedDict[str, StoredResponse], new: StoredResponse) -> None:
        self._forget_old(mine)
        size = new.size + sum(kept.size for kept in mine.values())
        finished = [kept for kept in mine.values() if kept.answer.done]
        while len(mine) >= self.policy.max_responses or size > self.policy.max_bytes:
            if not finished:
                sentence = "too many responses of this key run in the background or are kept"
                raise ApiError(429, "rate_limited", sentence, retry_after_s=10.0)
            oldest = finished.pop(0)
            size -= oldest.size
            del mine[oldest.answer.id]
