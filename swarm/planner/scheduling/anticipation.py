"""When sessions will come back: a client that decodes sends its next step as long after its last result as ever.

So a device need not begin what the next step of somebody further behind would wait for: it idles for a moment
(anticipatory scheduling: Iyer and Druschel, SOSP '01, for disks). Owns the times between a session's result and its
next step, typical for a share, whose sessions come and go. Knows neither queues nor who is behind; times are seconds
of any one clock, and come with the calls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from statistics import median

from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.policy import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """The next step of a session that is not here yet. `due_s`: when it is expected, `until_s`: until when one should
    wait for it; `work_ms`: what its last one was estimated to take."""

    share: Share
    due_s: float
    until_s: float
    work_ms: float


class _Pauses:
    """The latest ones of one share's sessions, seconds. Medians: a pause between two answers is none of these."""

    __slots__ = ("_latest", "deviation_s", "typical_s")

    def __init__(self, most: int) -> None:
        self._latest: deque[float] = deque(maxlen=most)
        self.typical_s = 0.0
        self.deviation_s = math.inf  # typically so far from the typical one

    def add(self, pause_s: float, needed: int) -> None:
        """`needed`: from how many on anything is known."""
        self._latest.append(pause_s)
        if len(self._latest) >= needed:
            self.typical_s = median(self._latest)
            self.deviation_s = median(abs(one - self.typical_s) for one in self._latest)


class Anticipation:
    """`completed` when a decoding step has run, `arrived` when the next one is here."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._away: dict[Hashable, tuple[float, Share, float]] = {}  # session -> since when, whose, work; oldest first
        self._pauses: dict[Share, _Pauses] = {}  # the least recent first

    def completed(self, session: Hashable, share: Share, work_ms: float, now_s: float) -> None:
        self._away.pop(session, None)
        self._away[session] = now_s, share, work_ms
        while (oldest := next(iter(self._away))) != session:
            if now_s - self._away[oldest][0] <= self._policy.active_session_s:
                break
            del self._away[oldest]

    def arrived(self, session: Hashable, now_s: float) -> None:
        away = self._away.pop(session, None)
        if away is None or now_s - away[0] > self._policy.active_session_s:
            return
        pauses = self._pauses.pop(away[1], None) or _Pauses(self._policy.max_pauses)
        self._pauses[away[1]] = pauses
        pauses.add(now_s - away[0], self._policy.min_pauses)
        if len(self._pauses) > self._policy.max_idle_shares:
            del self._pauses[next(iter(self._pauses))]

    def forget(self, session: Hashable) -> None:
        """It is closed, or sends something else than its next step."""
        self._away.pop(session, None)

    def expected(self, now_s: float, work_ms: float) -> Iterator[ExpectedStep]:
        """The steps that would wait for work which takes `work_ms` and begins now, as far as is known well enough."""
        policy, work_s = self._policy, work_ms / 1e3
        for since, share, next_ms in self._away.values():
            pauses = self._pauses.get(share)
            if pauses is None or pauses.deviation_s > work_s:
                continue
            due_s = since + pauses.typical_s
            late_s = max(policy.least_late * work_s, policy.late_deviations * pauses.deviation_s)
            until_s = due_s + min(work_s, late_s)
            if now_s < until_s and due_s < now_s + work_s:
                yield ExpectedStep(share, due_s, until_s, next_ms)
