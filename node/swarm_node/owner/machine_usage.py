"""Whether the machine is in use by others than this node: what `--pause-when-busy` goes by.

Owns what counts as others' use and the hysteresis. What is done about it is `duty`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import psutil

SAMPLE_S = 2.0
BUSY_SHARE = 0.4  # of all cores, taken by others: the machine is in use ...
BUSY_AFTER_S = 6.0  # ... when it has been so for this long,
IDLE_SHARE = 0.2  # and free again below this,
IDLE_AFTER_S = 30.0  # for this long

IN_USER_AND_NICE = ("guest", "guest_nice")  # Linux counts these there as well


class OtherCpuUsage:
    """`others()`: the share of all cores that processes other than ours took since it was last asked."""

    def __init__(self, own: Callable[[], Sequence[int]]) -> None:
        """`own`: process ids of this node."""
        self._own = own
        self._last = self._read()

    def others(self) -> float:
        before, self._last = self._last, self._read()
        total, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return min(1.0, max(0.0, (busy - max(0.0, own)) / total)) if total > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """(all CPU seconds, those not idle, our own) since the machine started."""
        times = psutil.cpu_times()._asdict()
        total = sum(times.values()) - sum(times.get(field, 0.0) for field in IN_USER_AND_NICE)
        idle = times["idle"] + times.get("iowait", 0.0)
        return total, total - idle, sum(map(_cpu_seconds, self._own()))


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class Hysteresis:
    """Turns shares into in use / free, without flapping."""

    def __init__(self) -> None:
        self.busy = False
        self._since: float | None = None  # when the share began to say the opposite

    def observe(self, share: float, now: float) -> bool:
        """Whether the machine is in use as of `now`, seconds of any clock."""
        turning = share < IDLE_SHARE if self.busy else share > BUSY_SHARE
        if not turning:
            self._since = None
            return self.busy
        if self._since is None:
            self._since = now
        if now - self._since >= (IDLE_AFTER_S if self.busy else BUSY_AFTER_S):
            self.busy, self._since = not self.busy, None
        return self.busy


def own_pids(daemon_pid: Callable[[], int]) -> Callable[[], Sequence[int]]:
    """This process and its p2p daemon."""
    return lambda: [pid for pid in (os.getpid(), daemon_pid()) if pid]
