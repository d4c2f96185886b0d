"""Emulated machines: an address of its own for each, and a fixed share of a core for all that runs on it (a cgroup with
a CPU quota).

A quota lets a group that was idle run at full speed for some milliseconds, until the kernel's next tick: as long as a
decoding step takes, so that an idle machine would be quicker than a busy one by half. So on each one core does all, and
a program of the lowest priority uses what is left.

Owns the groups and the shares. Knows no swarm. Where cgroups cannot be written (`cpu_groups` gives none), machines
share all cores as the operating system likes, so that work for one slows the others too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from process_swarm import Place, _die_with_parent
from siege_streets import Streets

# Five nodes, an attacker and an honest client, who is not limited, fit two cores also when all are busy.
NODE_CORES = 0.225
ATTACKER_CORES = 0.25

PERIOD_US = 4_500  # short: a machine that has used its share waits milliseconds, not a tenth of a second
WEIGHT = 32  # of a default group: what else this computer does takes little of the machines' shares
REMOVE_WITHIN_S = 5.0

_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")


class CpuGroup:
    """One machine's processor."""

    def __init__(self, folder: Path, v2: bool) -> None:
        """Raises OSError."""
        folder.mkdir()
        self._folder = folder
        self._v2 = v2
        self._write("cpu.weight" if v2 else "cpu.shares", str(100 * WEIGHT if v2 else 1024 * WEIGHT))

    def limit(self, cores: float | None) -> None:
        """From now on. None: no limit."""
        quota = None if cores is None else int(cores * PERIOD_US)
        if self._v2:
            self._write("cpu.max", f"{'max' if quota is None else quota} {PERIOD_US}")
        else:
            self._write("cpu.cfs_period_us", str(PERIOD_US))
            self._write("cpu.cfs_quota_us", str(-1 if quota is None else quota))

    @property
    def enter(self) -> tuple[str, ...]:
        """The command that brings another one, and all its children, here."""
        return "sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs")

    def fill(self, core: int) -> subprocess.Popen[bytes]:
        """Use what is left of its share, on that core."""
        command = (*self.enter, "taskset", "-c", str(core), "chrt", "--idle", "0", "sh", "-c", "while :; do :; done")
        return subprocess.Popen(command, preexec_fn=_die_with_parent)

    def join(self) -> None:
        """Bring this process here; its threads and those it starts, too."""
        self._write("cgroup.procs", str(os.getpid()))

    def remove(self) -> None:
        """Once its processes have ended; those that have not go back where groups come from."""
        until = time.monotonic() + REMOVE_WITHIN_S
        while self._folder.exists():
            with contextlib.suppress(OSError):
                for process in (self._folder / "cgroup.procs").read_text().split():
                    if process == str(os.getpid()) or time.monotonic() > until:
                        (self._folder.parent / "cgroup.procs").write_text(process)
                self._folder.rmdir()
                return
            if time.monotonic() > until + 1.0:
                return
            time.sleep(0.05)

    def _write(self, name: str, value: str) -> None:
        (self._folder / name).write_text(value)


@contextlib.contextmanager
def cpu_groups(machines: int) -> Iterator[list[CpuGroup]]:
    """So many, without a limit yet; empty where this user may make none."""
    groups: list[CpuGroup] = []
    v2 = (_V2 / "cgroup.controllers").exists()
    for left in (_V2 if v2 else _V1).glob("siege-*"):  # by sieges that were killed; the lock is ours
        with contextlib.suppress(OSError):
            left.rmdir()
    with contextlib.ExitStack() as stack:
        try:
            if v2:
                (_V2 / "cgroup.subtree_control").write_text("+cpu")
            for number in range(machines):
                group = CpuGroup((_V2 if v2 else _V1) / f"siege-{os.getpid()}-{number}", v2)
                stack.callback(group.remove)
                group.limit(None)
                groups.append(group)
        except OSError:
            stack.close()
            groups = []
        yield groups


class Machines:
    """Where each node runs, and the attacker: an address and, if `own_processors`, a share of a core."""

    def __init__(self, streets: Streets, groups: Sequence[CpuGroup], nodes: int) -> None:
        """`groups`: one for each node, one for the attacker and one for us; or none."""
        self.own_processors = bool(groups)
        self._streets = streets
        self._attacker: CpuGroup | None = None
        self._nodes = groups[:nodes]
        self._cores = sorted(os.sched_getaffinity(0))
        for group in self._nodes:
            group.limit(NODE_CORES)
        self.fillers = [group.fill(self._core(number)) for number, group in enumerate(self._nodes)]
        if groups:
            self._attacker, ours = groups[nodes:]
            ours.join()

    def node(self, number: int) -> Place:
        place = self._streets.place(number)
        if not self._nodes:
            return place
        return _in_group(place, self._nodes[number], "taskset", "-c", str(self._core(number)))

    @property
    def attacker(self) -> Place:
        return _in_group(self._streets.attacker, self._attacker) if self._attacker else self._streets.attacker

    def _core(self, number: int) -> int:
        return self._cores[number % len(self._cores)]

    def limit_attacker(self, limited: bool) -> None:
        """What prepares an attack is not limited."""
        if self._attacker is not None:
            self._attacker.limit(ATTACKER_CORES if limited else None)


@contextlib.contextmanager
def machines(nodes: int) -> Iterator[Machines]:
    """Waits until no other siege runs on this computer: two would not fit its cores."""
    with _alone(), Streets(nodes) as streets, cpu_groups(nodes + 2) as groups:
        made = Machines(streets, groups, nodes)
        try:
            yield made
        finally:
            for filler in made.fillers:
                filler.kill()
                filler.wait()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / "swarm-siege.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _in_group(place: Place, group: CpuGroup, *how: str) -> Place:
    return Place(place.address, (*group.enter, *how, *place.enter))
