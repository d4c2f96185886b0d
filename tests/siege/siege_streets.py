"""Machines with addresses of their own on one computer: a network namespace each, on one bridge.

Owns the namespaces and the addresses: each machine is in a /16 block of its own, as strangers are. Needs no root where
users may have namespaces; `enter_own_network` starts this program again in one. Knows no swarm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from process_swarm import Place

BRIDGE = "siege0"
HERE = "11.200.0.1"  # where this process is
ATTACKER = "11.66.0.2"
INSIDE = "--inside"


def enter_own_network() -> None:
    """Become root of a network namespace of our own, where nothing else is reachable; returns in there only."""
    if INSIDE in sys.argv:
        sys.argv.remove(INSIDE)
        return
    alone = ["unshare", "--user", "--map-root-user", "--net", sys.executable, *sys.argv, INSIDE]
    os.execvp(alone[0], alone)


class Streets:
    """A context manager; `place(number)` is the number-th machine."""

    def __init__(self, machines: int) -> None:
        self._sleepers = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(machines + 1)]
        self._addresses = [f"11.{number + 1}.0.2" for number in range(machines)] + [ATTACKER]

    def place(self, number: int) -> Place:
        inside = ("nsenter", "--target", str(self._sleepers[number].pid), "--net")
        return Place(self._addresses[number], inside)

    @property
    def attacker(self) -> Place:
        return self.place(len(self._sleepers) - 1)

    def __enter__(self) -> Streets:
        ours = os.stat("/proc/self/ns/net").st_ino
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{HERE}/8", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, sleeper in enumerate(self._sleepers):
            while os.stat(f"/proc/{sleeper.pid}/ns/net").st_ino == ours:
                time.sleep(0.01)
            there = self.place(number)
            _ip("link", "add", f"m{number}", "type", "veth", "peer", "name", "eth0", "netns", str(sleeper.pid))
            _ip("link", "set", f"m{number}", "master", BRIDGE, "up")
            for words in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{there.address}/8", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
            ):
                subprocess.run([*there.enter, "ip", *words], check=True)
        return self

    def __exit__(self, *error: object) -> None:
        for sleeper in self._sleepers:
            sleeper.kill()
            sleeper.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
