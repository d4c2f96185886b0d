"""Whether the machine is lent now: the owner may pause it, others may use it, or it is outside its active hours.

Owns the reasons and the tasks that watch for them. What a pause means for sessions is decided in `swarm_node.node`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from swarm.errors import NodeBusy
from swarm_node.owner.active_hours import ActiveHours
from swarm_node.owner.machine_usage import AvailabilityPolicy, Hysteresis, OtherCpuUsage

logger = logging.getLogger(__name__)

OWNER, BUSY, HOURS = "owner", "busy", "hours"


class Availability:
    """`reasons` not to serve, by kind; none: serve."""

    def __init__(self, policy: AvailabilityPolicy = AvailabilityPolicy()) -> None:
        self._policy = policy
        self.reasons: dict[str, str] = {}
        self._changed = asyncio.Event()

    @property
    def available(self) -> bool:
        return not self.reasons

    @property
    def in_hours(self) -> bool:
        """Whether the schedule lends the machine now."""
        return HOURS not in self.reasons

    def pause(self, kind: str, sentence: str) -> None:
        if kind not in self.reasons:
            logger.info("pausing: %s", sentence)
            self.reasons[kind] = sentence
            self._notify()

    def resume(self, kind: str) -> None:
        if self.reasons.pop(kind, None) is not None:
            logger.info("this reason to pause is over: %s", kind)
            self._notify()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, which depends on this object."""
        while not holds():
            await self._changed.wait()

    def refusal(self) -> NodeBusy:
        return NodeBusy(
            f"this node is paused: {'; '.join(self.reasons.values())}", retry_after_s=self._policy.retry_after_s
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def check_hours(self, schedule: ActiveHours, moment: datetime) -> None:
        if schedule.open_at(moment):
            self.resume(HOURS)
        else:
            self.pause(HOURS, f"outside its hours until {schedule.opens_after(moment):%H:%M}")

    async def keep_hours(self, schedule: ActiveHours, clock: Callable[[], datetime]) -> None:
        while True:
            self.check_hours(schedule, clock())
            await asyncio.sleep(self._policy.hours_check_interval_s)

    async def watch_usage(self, usage: OtherCpuUsage) -> None:
        """Pause while others use the machine."""
        in_use, loop = Hysteresis(self._policy), asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._policy.usage_sample_s)
            if in_use.observe(usage.others(), loop.time()):
                self.pause(BUSY, "the machine is in use")
            else:
                self.resume(BUSY)
