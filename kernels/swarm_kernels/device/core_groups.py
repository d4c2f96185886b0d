"""Two kinds of cores in one processor, and how work may be divided between them. Knows no kernels and no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
_KINDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")  # larger is faster
_LAST_CACHE = "cache/index3/shared_cpu_list"


@dataclass(frozen=True, slots=True)
class CoreGroups:
    """A thread for each of these cores. The narrow unit does `thousandths` of the columns of each linear layer."""

    fast: tuple[int, ...]
    slow: tuple[int, ...]
    slow_permille: int = 0

    @property
    def threads(self) -> int:
        return len(self.fast) + len(self.slow)


def find_core_groups(cores: Collection[int] | None = None, system: Path = _SYSTEM) -> CoreGroups | None:
    """The cores this process may use, or `cores`, as a wide and a narrow unit; None if there is but one core.

    Fast and slow cores where the system tells them apart, else those that share a last-level cache, else halves.
    """
    usable = sorted(cores if cores is not None else _allowed())
    if len(usable) < 2:
        return None
    for name in _KINDS:
        speeds = {core: _number(system / f"cpu{core}" / name) for core in usable}
        fastest = max(speeds.values())
        narrow = [core for core in usable if speeds[core] < fastest]
        if narrow:
            return _units(usable, narrow)
    first = _text(system / f"cpu{usable[0]}" / _LAST_CACHE)
    apart = [core for core in usable if _text(system / f"cpu{core}" / _LAST_CACHE) != first]
    return _units(usable, apart or usable[-(-len(usable) // 2) :])


def _units(cores: list[int], narrow: list[int]) -> CoreGroups:
    return CoreGroups(tuple(core for core in cores if core not in narrow), tuple(narrow))


def _allowed() -> Collection[int]:
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
