"""Fast and slow cores of one processor, and how columns of linear layers are split between them. No torch here."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
_SPEED_FILES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")  # larger is faster
_LAST_CACHE = "cache/index3/shared_cpu_list"


@dataclass(frozen=True, slots=True)
class CoreGroups:
    """Cores, one thread each. The slow group computes `slow_permille` thousandths of the columns of each linear
    layer."""

    fast: tuple[int, ...]
    slow: tuple[int, ...]
    slow_permille: int = 0

    @property
    def threads(self) -> int:
        return len(self.fast) + len(self.slow)


def find_core_groups(cores: Collection[int] | None = None, system: Path = _SYSTEM) -> CoreGroups | None:
    """The cores this process may use, or `cores`, as a fast and a slow group; None if there is only one core.

    Split by the speed that the system reports, else into those that share a last-level cache and the rest, else in
    halves."""
    usable = sorted(cores if cores is not None else _usable_cores())
    if len(usable) < 2:
        return None
    for name in _SPEED_FILES:
        speeds = {core: _number(system / f"cpu{core}" / name) for core in usable}
        fastest = max(speeds.values())
        slow = [core for core in usable if speeds[core] < fastest]
        if slow:
            return _groups(usable, slow)
    first = _text(system / f"cpu{usable[0]}" / _LAST_CACHE)
    others = [core for core in usable if _text(system / f"cpu{core}" / _LAST_CACHE) != first]
    return _groups(usable, others or usable[-(-len(usable) // 2) :])


def _groups(cores: list[int], slow: list[int]) -> CoreGroups:
    return CoreGroups(tuple(core for core in cores if core not in slow), tuple(slow))


def _usable_cores() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0
