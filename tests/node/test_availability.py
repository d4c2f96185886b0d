"""Hours, the use of the machine, and the reasons for a pause."""

from __future__ import annotations

import asyncio
import os
from collections import namedtuple
from datetime import datetime, timedelta
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_clock import virtual_time

from swarm.errors import UsageError
from swarm_node.owner.active_hours import ActiveHours
from swarm_node.owner.availability import HOURS, OWNER, Availability
from swarm_node.owner.machine_usage import AvailabilityPolicy, Hysteresis, OtherCpuUsage

NOON = datetime(2026, 3, 1, 12, 0)
POLICY = AvailabilityPolicy()


@pytest.mark.parametrize(
    ("text", "lent", "kept"),
    [
        ("22:00-08:00", ("22:00", "23:59", "00:00", "07:59"), ("08:00", "12:00", "21:59")),
        ("12:30-13:30, 20:00-24:00", ("12:30", "13:29", "20:00", "23:59"), ("12:29", "13:30", "00:00")),
        ("00:00-24:00", ("00:00", "12:00", "23:59"), ()),
    ],
)
def test_windows_of_local_time(text: str, lent: tuple[str, ...], kept: tuple[str, ...]) -> None:
    schedule = ActiveHours.parse(text)
    for time, is_open in [(t, True) for t in lent] + [(t, False) for t in kept]:
        moment = datetime.strptime(f"2026-03-01 {time}", "%Y-%m-%d %H:%M")
        assert schedule.open_at(moment) is is_open, time


@pytest.mark.parametrize("text", ["", "22-8", "22:00", "25:00-08:00", "22:00-24:30", "10:60-11:00", "a:b-c:d"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a time of day"):
        ActiveHours.parse(text)


@given(st.lists(st.tuples(st.integers(0, 1439), st.integers(0, 1439)), min_size=1, max_size=3), st.integers(0, 1439))
def test_the_next_opening_is_open_and_comes_within_a_day(windows: list[tuple[int, int]], minute: int) -> None:
    schedule = ActiveHours(tuple(windows))
    moment = NOON.replace(hour=minute // 60, minute=minute % 60)
    opening = schedule.opens_after(moment)
    assert schedule.open_at(opening)
    assert timedelta() < opening - moment <= timedelta(days=1)


Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")  # psutil's, on Linux


class Counters:
    """The counters of a machine and of one process of ours, 7."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set(0, 0, 0)
        monkeypatch.setattr(psutil, "cpu_times", lambda: Times(self.busy, 0, 0, self.idle, 0, 0, 0, 0, 99, 99))
        monkeypatch.setattr(psutil, "Process", self.process)

    def set(self, busy: int, idle: int, own: int) -> None:
        self.busy, self.idle, self.own = busy, idle, own

    def process(self, pid: int) -> SimpleNamespace:
        if pid != 7:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=self.own, system=0))


def test_our_own_cpu_time_is_not_counted_as_use_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(monkeypatch)
    use = OtherCpuUsage(lambda: [7, 8])
    counters.set(busy=80, idle=20, own=80)
    assert use.others() == 0.0
    counters.set(busy=160, idle=40, own=90)
    assert use.others() == pytest.approx(0.7)
    assert use.others() == 0.0  # no time has passed


def test_the_counters_of_this_machine_can_be_read() -> None:
    use = OtherCpuUsage(lambda: [os.getpid(), 2**22 + 1])
    sum(range(10**6))
    assert 0.0 <= use.others() <= 1.0


def test_hysteresis_ignores_short_bursts_and_short_idle_times() -> None:
    in_use = Hysteresis()
    assert not in_use.observe(0.9, 0.0)
    assert not in_use.observe(0.1, 1.0)
    assert not in_use.observe(0.9, 2.0)
    assert in_use.observe(0.9, 2.0 + POLICY.busy_after_s)
    assert in_use.observe(0.3, 20.0)  # between the two thresholds
    assert in_use.observe(0.1, 30.0)
    assert in_use.observe(0.1, 29.9 + POLICY.idle_after_s)
    assert not in_use.observe(0.1, 30.0 + POLICY.idle_after_s)


@virtual_time
async def test_a_node_serves_when_no_reason_is_left() -> None:
    availability = Availability()
    idle = asyncio.create_task(availability.until(lambda: not availability.available))
    await asyncio.sleep(1)
    assert not idle.done()
    availability.pause(OWNER, "paused by its owner")
    availability.check_hours(ActiveHours.parse("20:00-21:00"), NOON)
    await idle
    assert (availability.available, availability.in_hours) == (False, False)
    assert availability.reasons[HOURS] == "outside its hours until 20:00"
    assert "paused by its owner" in str(availability.refusal())
    assert availability.refusal().retry_after_s > 0
    availability.resume(OWNER)
    assert not availability.available
    availability.check_hours(ActiveHours.parse("11:00-21:00"), NOON)
    assert availability.available
