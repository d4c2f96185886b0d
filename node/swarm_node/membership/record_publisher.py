"""Keeps this node's record in the directory fresh: at intervals, and at once when something changed.

Owns when to publish. What the record says is asked for each time, so nothing here can be out of date; how it is signed
and bounded is `swarm.records`'.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from swarm import records
from swarm.config import Limits
from swarm.errors import NetworkError
from swarm.net.base.transport import Directory
from swarm.types import NodeProfile

logger = logging.getLogger(__name__)

PUBLISH_RETRY_FOR_S = 15.0
RETRY_S = 1.0
MIN_INTERVAL_S = 0.2  # between two publications, however often something changes
WITHDRAW_S = 2.0  # that leaving may take


class RecordPublisher:
    """`await run()` in a task; `changed()` when the profile did; `withdraw()` at the end, or until `appear()`."""

    def __init__(
        self,
        directory: Directory,
        sign: records.Sign,
        model: str,
        num_layers: int,
        profile: Callable[[float], NodeProfile],
        limits: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`profile(now)` is what to publish, dated `now` (seconds since the epoch)."""
        self._directory = directory
        self._sign = sign
        self._model = model
        self._num_layers = num_layers
        self._profile = profile
        self._limits = limits
        self._clock = clock
        self._change = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._withdrawn = False
        self.failures = 0  # in a row

    def changed(self) -> None:
        """Publish soon."""
        self._change.set()

    async def run(self) -> None:
        """Publish until cancelled. A directory that cannot be reached is tried again at the next interval."""
        while True:
            try:
                await self.publish()
            except NetworkError as error:
                self.failures += 1
                level = logging.WARNING if self.failures > 1 else logging.INFO  # once is nothing: peers come and go
                logger.log(level, "could not publish our record (%d times in a row): %s", self.failures, error)
            await asyncio.sleep(MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(self._limits.publish_interval_s - MIN_INTERVAL_S):
                    await self._change.wait()
            except TimeoutError:
                continue

    async def publish_until_ok(self) -> None:
        """Publish now, and again until it succeeds. Raises NetworkError once that has taken INSIST_S: peers that are
        overloaded answer a little later."""
        deadline = asyncio.get_running_loop().time() + PUBLISH_RETRY_FOR_S
        while True:
            try:
                return await self.publish()
            except NetworkError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                logger.warning("could not publish our record, trying again: %s", error)
            await asyncio.sleep(RETRY_S)

    async def publish(self) -> None:
        """Publish now. Raises NetworkError."""
        async with self._publishing:
            if self._withdrawn:
                return
            self._change.clear()
            profile = self._profile(self._clock())
            record, expires_at = records.encode(
                profile, self._model, self._num_layers, self._limits.record_ttl_s, self._sign
            )
            await self._directory.publish(record, self._model, expires_at)
            self.failures = 0

    async def withdraw(self) -> None:
        """Take our record back, best effort: one that stays expires by itself. Until `appear`, nothing is published."""
        self._withdrawn = True
        try:
            async with asyncio.timeout(WITHDRAW_S), self._publishing:
                await self._directory.withdraw(self._model)
        except (NetworkError, TimeoutError) as error:
            logger.warning("could not withdraw our record, it expires by itself: %s", error)

    def resume(self) -> None:
        """Publish again."""
        self._withdrawn = False
        self.changed()
