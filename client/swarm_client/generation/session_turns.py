"""How many sessions a client has open at once: no more than a node admits of one peer. The others wait for their turn.

Owns the two limits: of all generations, and of those that are parts of one answer (forks, the points of an outline),
which leave room for ordinary answers beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from swarm.config import Limits
from swarm.errors import NodeBusy


class SessionTurns:
    """Of one client. `parts`: one is held by every part of an answer that runs, before its turn."""

    def __init__(self, limits: Limits, spare: int = 2) -> None:
        """`spare`: sessions that parts leave to others; more of them leave fewer parts in parallel."""
        self.most = limits.max_sessions_per_peer
        self._patience_s = limits.turn_timeout_s
        self._turns = asyncio.Semaphore(self.most)
        self.parts = asyncio.Semaphore(max(1, self.most - spare))

    @property
    def is_over(self) -> bool:
        """Whether a turn can be had only when another generation ends."""
        return self._turns.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """First come, first served. Raises NodeBusy if it does not come in time: perhaps somebody holds streams open
        without reading them."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._turns.acquire()
        except TimeoutError:
            raise NodeBusy(
                f"this client has {self.most} generations open, the most at once, and this one has waited"
                f" {self._patience_s:g} s for its turn; read each stream to its end, or close it"
            ) from None
        try:
            yield
        finally:
            self._turns.release()
