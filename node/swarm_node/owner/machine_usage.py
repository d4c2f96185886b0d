"""Whether programs other than this node use the machine, for `--pause-when-busy`.

Owns what counts as use by others, and the hysteresis. `availability` acts on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

IN_USER_AND_NICE = ("guest", "guest_nice")  # Linux counts these there as well


@dataclass(frozen=True, slots=True)
class AvailabilityPolicy:
    """When the machine is lent: a quick pause spares its owner, a slow resume avoids flapping."""

    usage_sample_s: float = 2.0
    """Between two samples of the CPU use."""
    busy_fraction: float = 0.4
    """Of all cores, used by others: the machine is in use above this ..."""
    busy_after_s: float = 6.0
    """... for so long,"""
    idle_fraction: float = 0.2
    """and free again below this ..."""
    idle_after_s: float = 30.0
    """... for so long."""
    hours_check_interval_s: float = 5.0
    """Between two comparisons of the clock with the active hours."""
    retry_after_s: float = 30.0
    """Clients that a paused node refuses come back after so long."""


class OtherCpuUsage:
    """`others()`: the share of all cores that processes other than ours used since the last call."""

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
    """Turns CPU fractions into in use / free, without flapping."""

    def __init__(self, policy: AvailabilityPolicy = AvailabilityPolicy()) -> None:
        self._policy = policy
        self.busy = False
        self._since: float | None = None  # when the fraction crossed the threshold

    def observe(self, fraction: float, now: float) -> bool:
        """Whether the machine is in use as of `now`, seconds of any clock."""
        policy = self._policy
        turning = fraction < policy.idle_fraction if self.busy else fraction > policy.busy_fraction
        if not turning:
            self._since = None
            return self.busy
        if self._since is None:
            self._since = now
        if now - self._since >= (policy.idle_after_s if self.busy else policy.busy_after_s):
            self.busy, self._since = not self.busy, None
        return self.busy


def own_pids(daemon_pid: Callable[[], int]) -> Callable[[], Sequence[int]]:
    """This process and its p2p daemon."""
    return lambda: [pid for pid in (os.getpid(), daemon_pid()) if pid]
