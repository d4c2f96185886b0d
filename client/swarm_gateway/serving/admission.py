"""How many requests of one model run at once, and who is next. Independent of HTTP and of the swarm."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarm_gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """`max_running`: more share the nodes' batches and each gets slower; fewer leave nodes idle."""

    max_running: int = 64
    max_queued: int = 256
    timeout_s: float = 60.0  # in the queue
    retry_after_s: float = 2.0  # what is told to those turned away, at least


class Admission:
    """At most `max_running` requests at once, `max_queued` waiting; callers take turns, each in its own order."""

    def __init__(self, policy: AdmissionPolicy | None = None) -> None:
        self.policy = policy or AdmissionPolicy()
        self.running = 0
        self.queued = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def check(self) -> None:
        """Raises ApiError, status 429, if a request that comes now would be turned away."""
        if self.running >= self.policy.max_running and self.queued >= self.policy.max_queued:
            raise self._full("too many requests wait for this model")

    @asynccontextmanager
    async def turn(self, caller: str = "") -> AsyncIterator[None]:
        """Wait for one's turn and hold it. Raises ApiError, status 429."""
        self.check()
        if self.running < self.policy.max_running:  # then nobody waits
            self.running += 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self.queued += 1
        try:
            async with asyncio.timeout(self.policy.timeout_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # it came at the same moment: hand it on
                self._leave()
            else:
                self._forget(caller, turn)
            if isinstance(error, TimeoutError):
                raise self._full(f"no turn within {self.policy.timeout_s:g} s") from None
            raise

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        self.queued -= 1
        self._waiting[caller].remove(turn)
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _leave(self) -> None:
        """Hand the turn to the caller who has waited longest for one."""
        if not self._waiting:
            self.running -= 1
            return
        caller, turns = self._waiting.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._waiting[caller] = turns  # behind all others
        self.queued -= 1
        turn.set_result(None)

    def _full(self, reason: str) -> ApiError:
        wait_s = self.policy.retry_after_s * (1 + self.queued // max(1, self.policy.max_running))
        return ApiError(429, "rate_limited", f"the swarm is full: {reason}; try again soon", retry_after_s=wait_s)
