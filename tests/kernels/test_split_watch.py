"""A split between two core groups is tried again in live steps, and undone when it no longer pays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm_kernels.calibration import hetero_cores
from swarm_kernels.calibration.hetero_cores import ColumnSplitPolicy
from swarm_kernels.calibration.split_watch import SplitWatch
from swarm_kernels.device.core_groups import CoreGroups

GROUPS = CoreGroups((0,), (1,), 250)
POLICY = ColumnSplitPolicy(recheck_s=100.0)
COLD_MS = 50.0  # more that the first step after a change takes


class Machine:
    """A clock that steps move on, and which of split and pool is applied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, split_ms: float, pool_ms: float) -> None:
        self.now, self.split, self.changed = 0.0, True, False
        self.ms = {True: split_ms, False: pool_ms}
        self.applied: list[CoreGroups | None] = []
        monkeypatch.setattr(hetero_cores, "apply", self.apply)
        self.watch = SplitWatch(GROUPS, 2, POLICY, lambda: self.now)

    def apply(self, groups: CoreGroups | None, threads: int) -> None:
        assert threads == 2
        assert (groups is not None) != self.split  # nothing is applied twice
        self.split, self.changed = groups is not None, True
        self.applied.append(groups)

    def step(self, rows: int = 1) -> None:
        def compute() -> str:
            self.now += (rows * self.ms[self.split] + (COLD_MS if self.changed else 0.0)) / 1e3
            self.changed = False
            return "computed"

        assert self.watch.run(rows, compute) == "computed"


def test_nothing_is_tried_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 10.0, 9.0)
    while machine.now < 99.9:
        machine.step()
    assert not machine.applied


def steps_until(machine: Machine, done: Callable[[], bool]) -> int:
    machine.now = max(machine.now, 100.0)
    count = 0
    while not done():
        machine.step()
        count += 1
        assert count < 200
    return count


def test_a_split_that_no_longer_pays_is_undone_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 10.0, 9.9)
    assert steps_until(machine, lambda: machine.watch.groups is None) == 12  # three pairs lost, of four steps each
    assert not machine.split
    applied = len(machine.applied)
    machine.now += 1e6
    for _ in range(50):
        machine.step()
    assert len(machine.applied) == applied  # for good


def test_a_split_that_pays_stays_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 7.0, 10.0)
    for _ in range(2):
        machine.now += 100.0
        for _ in range(4 * POLICY.pairs + 3):
            machine.step()
        assert machine.split
        assert machine.watch.groups == GROUPS
    assert machine.applied.count(None) == POLICY.pairs  # a pool a pair, but that two pairs share one in a row
    machine.ms[True] = 11.0
    machine.now += 100.0
    assert steps_until(machine, lambda: machine.watch.groups is None) == 12


def test_only_batches_of_as_many_rows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 7.0, 10.0)
    machine.now = 100.0
    for rows in range(1, 200):  # each wider and slower than the one before
        machine.step(rows)
    assert machine.watch.groups == GROUPS
    steps_until(machine, lambda: machine.watch._trial is None)
    assert machine.watch.groups == GROUPS
    assert machine.split
