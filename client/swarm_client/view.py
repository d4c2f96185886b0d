"""The client's view of the swarm: a fresh Snapshot when one is needed, and the chain it picks.

Owns the snapshot's age and the link times the client measured itself. The choice is `plan.routing`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from swarm.records import to_snapshot

from swarm.net.carrier import Directory
from swarm.types import Snapshot

MAX_AGE_S = 1.0


class SwarmView:
    """`wall_clock` is what records are dated by; tests hand in their own."""

    def __init__(
        self,
        directory: Directory,
        model: str,
        *,
        dtype: str | None,
        weight_hash: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._model = model
        self._dtype = dtype
        self._weight_hash = weight_hash
        self._wall_clock = wall_clock
        self._snapshot: Snapshot | None = None
        self._lock = asyncio.Lock()

    async def snapshot(self, *, fresh: bool = False) -> Snapshot:
        """At most a second old unless `fresh`. Raises NetworkError."""
        async with self._lock:
            now = self._wall_clock()
            if fresh or self._snapshot is None or now - self._snapshot.taken_at > MAX_AGE_S:
                self._snapshot = to_snapshot(await self._directory.read(self._model), self._model, now)
            return self._snapshot
