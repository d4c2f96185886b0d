"""The part of a core that a process may use, from files as Linux writes them, and from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.net.base.cpu_quota import LEAST, core_part
from swarm.net.base.half_open import HandshakePolicy
from swarm.net.pool.frame_budgets import FrameBudgetPolicy


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def part(tmp_path: Path, proc: str) -> float:
    (tmp_path / "proc").write_text(proc)
    return core_part(tmp_path / "proc", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("22500 100000\n", 0.225),
        ("max 100000\n", 1.0),
        ("400000 100000\n", 1.0),  # four cores: an event loop has one
        ("1 100000\n", LEAST),
        ("0 100000\n", 1.0),
        ("100 0\n", 1.0),
        ("half of it\n", 1.0),
        ("", 1.0),
        ("9" * 400 + " 1\n", 1.0),
    ],
)
def test_version_2(tmp_path: Path, text: str, expected: float) -> None:
    group(tmp_path / "cgroup", "a/b", cpu__max=text)
    assert part(tmp_path, "0::/a/b\n") == expected


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", "a", cpu__max="50000 100000\n")
    group(tmp_path / "cgroup", "a/b", cpu__max="max 100000\n")
    assert part(tmp_path, "0::/a/b\n") == 0.5


@pytest.mark.parametrize(("quota", "expected"), [("1012\n", 1012 / 4500), ("-1\n", 1.0), ("\udc80", 1.0)])
def test_version_1(tmp_path: Path, quota: str, expected: float) -> None:
    group(tmp_path / "cgroup", "cpu/n", cpu__cfs_period_us="4500\n")
    (tmp_path / "cgroup/cpu/n/cpu.cfs_quota_us").write_bytes(quota.encode(errors="surrogateescape"))
    assert part(tmp_path, "4:memory:/n\n1:cpu,cpuacct:/n\n0::/\n") == expected


def test_elsewhere_it_is_a_whole_core(tmp_path: Path) -> None:
    assert core_part(tmp_path / "none", tmp_path / "none") == 1.0
    assert part(tmp_path, "0::/../../x\nnonsense\n1:cpu\n") == 1.0
    assert LEAST <= core_part() <= 1.0


def test_budgets_shrink_with_it_and_newcomers_still_get_in() -> None:
    frames, handshakes = FrameBudgetPolicy(), HandshakePolicy()
    assert frames.for_part(1.0) == frames
    assert frames.for_part(0.25).peer_rate == 0.25 * frames.peer_rate
    assert frames.for_part(0.25).unasked_burst == frames.unasked_burst, "races are as many on any machine"
    assert handshakes.for_part(1.0) == handshakes
    assert handshakes.for_part(0.25).per_s == 0.25 * handshakes.per_s
    assert handshakes.for_part(LEAST).block_per_s >= 1.0
    assert handshakes.for_part(LEAST).burst >= handshakes.for_part(LEAST).block_burst >= 10.0
