"""Whether the machine is in use by others than this node: what `--pause-when-busy` goes by.

Owns the reading of Linux's CPU counters and the hysteresis. What is done about it is `duty`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.errors import UsageError

PROC = Path("/proc")
SAMPLE_S = 2.0
BUSY_SHARE = 0.4  # of all cores, taken by others: the machine is in use ...
BUSY_AFTER_S = 6.0  # ... when it has been so for this long,
CALM_SHARE = 0.2  # and free again below this,
CALM_AFTER_S = 30.0  # for this long

IDLE_FIELDS = (3, 4)  # of a cpu line in /proc/stat: idle, iowait
GUEST_FIELDS = 8  # the fields behind these eight are counted in user and nice as well


class CpuUse:
    """`others()`: the share of all cores that processes other than ours took since it was last asked."""

    def __init__(self, own: Callable[[], Sequence[int]], proc: Path = PROC) -> None:
        """`own`: process ids of this node. Raises UsageError where there are no such counters."""
        self._own = own
        self._proc = proc
        if not (proc / "stat").exists():
            raise UsageError("--pause-when-busy reads Linux's /proc/stat, which is not here; leave it out")
        self._last = self._read()

    def others(self) -> float:
        before, self._last = self._last, self._read()
        total, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return min(1.0, max(0.0, (busy - max(0, own)) / total)) if total > 0 else 0.0

    def _read(self) -> tuple[int, int, int]:
        """(all ticks, those not idle, our own) since the machine started."""
        fields = [int(field) for field in (self._proc / "stat").read_text().splitlines()[0].split()[1:]][:GUEST_FIELDS]
        total = sum(fields)
        return total, total - sum(fields[i] for i in IDLE_FIELDS), sum(self._ticks(pid) for pid in self._own())

    def _ticks(self, pid: int) -> int:
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return 0  # it has ended
        after_name = text.rpartition(")")[2].split()  # the name may hold anything
        return int(after_name[11]) + int(after_name[12])  # utime, stime


class Hysteresis:
    """Turns shares into in use / free, without flapping."""

    def __init__(self) -> None:
        self.busy = False
        self._since: float | None = None  # when the share began to say the opposite

    def observe(self, share: float, now: float) -> bool:
        """Whether the machine is in use as of `now`, seconds of any clock."""
        turning = share < CALM_SHARE if self.busy else share > BUSY_SHARE
        if not turning:
            self._since = None
            return self.busy
        if self._since is None:
            self._since = now
        if now - self._since >= (CALM_AFTER_S if self.busy else BUSY_AFTER_S):
            self.busy, self._since = not self.busy, None
        return self.busy


def own_pids(daemon_pid: Callable[[], int]) -> Callable[[], Sequence[int]]:
    """This process and its p2p daemon."""
    return lambda: [pid for pid in (os.getpid(), daemon_pid()) if pid]
