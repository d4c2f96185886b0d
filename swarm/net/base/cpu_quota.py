"""How much of a core this process may use: containers and services often have a quota below one.

What others may cost us is budgeted in parts of a core, so it has to be less where there is less. Reads the cgroup files
of Linux (cgroups(7)). Elsewhere, and where they cannot be read, a whole core is assumed. That a core is slow is not
noticed: no speed is measured.
"""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath

LEAST = 0.1  # below it nothing would be served any more


def core_part(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Of one core, `LEAST` to 1: the least quota of the groups that this process is in."""
    part = 1.0
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                part = min(part, *(_quota_v2(folder) for folder in _upwards(root, path)))
            elif "cpu" in controllers.split(","):
                part = min(part, *(_quota_v1(folder) for folder in _upwards(root / "cpu", path)))
    return max(LEAST, part)


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of a group and of all above it. One that is not below `root` as we see it is passed over."""
    inside = PurePosixPath(path.lstrip("/"))
    return [root] if ".." in inside.parts else [root / one for one in (inside, *inside.parents)]


def _quota_v2(folder: Path) -> float:
    return _ratio(*_words(folder / "cpu.max", 2))


def _quota_v1(folder: Path) -> float:
    return _ratio(*_words(folder / "cpu.cfs_quota_us", 1), *_words(folder / "cpu.cfs_period_us", 1))


def _words(file: Path, count: int) -> list[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        words = file.read_text().split()
        if len(words) == count:
            return words
    return [""] * count


def _ratio(quota: str, period: str) -> float:
    """1 without a quota ("max", or -1)."""
    with contextlib.suppress(ValueError, ZeroDivisionError, OverflowError):
        ratio = int(quota) / int(period)
        return ratio if ratio > 0 else 1.0
    return 1.0
