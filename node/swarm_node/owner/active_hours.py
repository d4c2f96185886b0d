"""When a volunteer lends the machine: windows of local time, as in `22:00-08:00,12:30-13:30`.

Owns their syntax and whether a moment lies in one. Reads no clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from swarm.errors import UsageError

DAY = 24 * 60  # minutes

_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class ActiveHours:
    """`windows`: (from, to) in minutes after midnight; one whose end is not after its start ends on the next day."""

    windows: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> ActiveHours:
        """Raises UsageError."""
        windows = []
        for part in text.replace(" ", "").split(","):
            match = _WINDOW.fullmatch(part)
            numbers = [int(number) for number in match.groups()] if match else [99, 99, 99, 99]
            start, end = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
            if start >= DAY or end > DAY or numbers[1] > 59 or numbers[3] > 59:
                raise UsageError(f"'{part}' is not a time of day; write --active-hours as in 22:00-08:00,12:30-13:30")
            windows.append((start, end % DAY))
        return cls(tuple(windows))

    def open_at(self, moment: datetime) -> bool:
        """Whether the machine is lent at `moment`, local time."""
        minute = moment.hour * 60 + moment.minute
        return any(_within(minute, start, end) for start, end in self.windows)

    def opens_after(self, moment: datetime) -> datetime:
        """The next start of a window after `moment`."""
        midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
        starts = [midnight + timedelta(days=day, minutes=start) for day in (0, 1) for start, _ in self.windows]
        return min(start for start in starts if start > moment)


def _within(minute: int, start: int, end: int) -> bool:
    if start < end:
        return start <= minute < end
    return minute >= start or minute < end
