"""Whether this node takes sessions now: its owner may pause it, the machine may be in use, or it is not the hour.

Owns the reasons why it does not, and the watches that come and go with them. What a pause means for sessions is
`leaving`'s and the daemon's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from swarm.errors import NodeBusy
from swarm_node.owner.active_hours import ActiveHours
from swarm_node.owner.machine_usage import SAMPLE_S, Hysteresis, OtherCpuUsage

logger = logging.getLogger(__name__)

ASKED, BUSY, HOURS = "asked", "busy", "hours"
CHECK_HOURS_S = 5.0
RETRY_AFTER_S = 30.0  # what clients of a paused node are told


class Availability:
    """`reasons` not to serve, by kind; none: serve."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._changed = asyncio.Event()

    @property
    def on(self) -> bool:
        return not self.reasons

    @property
    def hours(self) -> bool:
        """Whether the schedule lends the machine now."""
        return HOURS not in self.reasons

    def stop(self, kind: str, sentence: str) -> None:
        if kind not in self.reasons:
            logger.info("pausing: %s", sentence)
            self.reasons[kind] = sentence
            self._tell()

    def resume(self, kind: str) -> None:
        if self.reasons.pop(kind, None) is not None:
            logger.info("no longer paused because of: %s", kind)
            self._tell()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, which depends on this object."""
        while not holds():
            await self._changed.wait()

    def refusal(self) -> NodeBusy:
        return NodeBusy(f"this node is paused: {'; '.join(self.reasons.values())}", retry_after_s=RETRY_AFTER_S)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def check_hours(self, schedule: ActiveHours, moment: datetime) -> None:
        if schedule.open_at(moment):
            self.resume(HOURS)
        else:
            self.stop(HOURS, f"outside its hours until {schedule.opens_after(moment):%H:%M}")

    async def keep_hours(self, schedule: ActiveHours, clock: Callable[[], datetime]) -> None:
        while True:
            self.check_hours(schedule, clock())
            await asyncio.sleep(CHECK_HOURS_S)

    async def watch_use(self, use: OtherCpuUsage) -> None:
        """Pause while others use the machine."""
        in_use, loop = Hysteresis(), asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAMPLE_S)
            if in_use.observe(use.others(), loop.time()):
                self.stop(BUSY, "the machine is in use")
            else:
                self.resume(BUSY)
