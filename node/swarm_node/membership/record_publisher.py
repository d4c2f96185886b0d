"""Keeps this node's record fresh, in the directory and for peers that ask: at intervals, and soon after a change.

Owns when to publish, and the goodbye. The profile is computed anew each time; signing and bounds are in
`swarm.records`.
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
from swarm_node.membership.policy import PublishPolicy

logger = logging.getLogger(__name__)

_DATE_STEP_S = 1e-3


class RecordPublisher:
    """`await run()` in a task; `changed()` when the profile did; `withdraw()` at the end, or until `resume()`."""

    def __init__(
        self,
        directory: Directory,
        sign: records.Sign,
        model: str,
        num_layers: int,
        profile: Callable[[float], NodeProfile],
        limits: Limits,
        clock: Callable[[], float] = time.time,
        policy: PublishPolicy = PublishPolicy(),
        *,
        keep_own: Callable[[bytes], None] = lambda record: None,
        is_known: Callable[[], bool] = lambda: False,
    ) -> None:
        """`profile(now)` is what to publish, dated `now` (seconds since the epoch). `keep_own` gets each record before
        the directory does; `is_known()`: whether peers learn of us even where the directory fails."""
        self._directory = directory
        self._sign = sign
        self._model = model
        self._num_layers = num_layers
        self._profile = profile
        self._limits = limits
        self._clock = clock
        self._policy = policy
        self._keep_own = keep_own
        self._is_known = is_known
        self._last_at = 0.0  # of what was published
        self._change = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._withdrawn = False
        self.failures = 0  # in a row

    def changed(self) -> None:
        """Publish soon."""
        self._change.set()

    async def run(self) -> None:
        """Publish until cancelled. After a failure the next attempt is at the next interval."""
        while True:
            try:
                await self.publish()
            except NetworkError as error:
                self.failures += 1
                level = logging.WARNING if self.failures > 1 else logging.INFO  # a single failure is normal churn
                logger.log(level, "could not publish our record (%d times in a row): %s", self.failures, error)
            await asyncio.sleep(self._policy.min_interval_s)
            try:
                async with asyncio.timeout(self._limits.publish_interval_s - self._policy.min_interval_s):
                    await self._change.wait()
            except TimeoutError:
                continue

    async def publish_until_ok(self) -> None:
        """Publish now, and again until it succeeds. Raises NetworkError after `PublishPolicy.retry_for_s`, unless peers
        know of us all the same."""
        deadline = asyncio.get_running_loop().time() + self._policy.retry_for_s
        while True:
            try:
                return await self.publish()
            except NetworkError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    if self._is_known():
                        return None
                    raise
                logger.warning("could not publish our record, trying again: %s", error)
            await asyncio.sleep(self._policy.retry_s)

    async def publish(self) -> None:
        """Publish now. Raises NetworkError."""
        async with self._publishing:
            if self._withdrawn:
                return
            self._change.clear()
            profile = self._profile(self._next_date())
            record, expires_at = records.encode(
                profile, self._model, self._num_layers, self._limits.record_ttl_s, self._sign
            )
            self._keep_own(record)
            await self._directory.publish(record, self._model, expires_at)
            self.failures = 0

    async def withdraw(self) -> None:
        """Publish a goodbye in place of our record, best effort: a record that stays expires by itself. Nothing else is
        published until `resume`."""
        if self._withdrawn or not self._last_at:
            self._withdrawn = True
            return
        self._withdrawn = True
        profile = self._profile(self._next_date())
        goodbye, expires_at = records.encode_goodbye(
            profile.peer,
            self._model,
            profile.weight_hash,
            self._num_layers,
            profile.published_at,
            self._limits.record_ttl_s,
            self._sign,
        )
        self._keep_own(goodbye)
        try:
            async with asyncio.timeout(self._policy.withdraw_timeout_s), self._publishing:
                await self._directory.publish(goodbye, self._model, expires_at)
        except (NetworkError, TimeoutError) as error:
            logger.warning("could not withdraw our record, it expires by itself: %s", error)

    def resume(self) -> None:
        """Publish again."""
        self._withdrawn = False
        self.changed()

    def _next_date(self) -> float:
        """Now, but later than any record before, as the newest wins."""
        self._last_at = max(self._clock(), self._last_at + _DATE_STEP_S)
        return self._last_at
