"""Virtual time: events in the order of their time, and of their scheduling where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Clock:
    """`now` in ms from the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Event]] = []
        self._scheduled = 0

    def at(self, time: float, event: Event) -> None:
        """Run `event` at `time`, or now if that has passed."""
        heapq.heappush(self._queue, (max(time, self.now), self._scheduled, event))
        self._scheduled += 1

    def after(self, delay: float, event: Event) -> None:
        self.at(self.now + delay, event)

    def run(self, until: float) -> int:
        """Run all events up to `until`, those included that they schedule. Returns how many there were."""
        count = 0
        while self._queue and self._queue[0][0] <= until:
            self.now, _, event = heapq.heappop(self._queue)
            event()
            count += 1
        return count

    def stop(self) -> None:
        """Drop all scheduled events."""
        self._queue.clear()
