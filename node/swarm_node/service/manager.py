"""Has the service manager of this user run the node: systemd (Linux) or launchd (macOS).

Owns the files that the managers read, and their commands. What is in the files is `definition`'s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm.config import state_dir
from swarm.errors import ResourceError, UsageError
from swarm_node.service.definition import (
    LABEL,
    LAUNCHD_LABEL,
    STOP_S,
    ServiceDefinition,
    environment_text,
    launchd_plist,
    systemd_unit,
)

COMMAND_S = 30.0  # that a manager may take to answer


@dataclass(frozen=True)
class ServiceStatus:
    """installed: the manager has a file of ours. state: in its own words. pid: 0 if it does not run. restarts: since it
    was last started by hand."""

    installed: bool
    state: str
    pid: int = 0
    restarts: int = 0
    since: str = ""
    memory: int | None = None  # bytes
    cpu_s: float | None = None


class ServiceManager(Protocol):
    """Each method raises ResourceError or UsageError in one sentence."""

    def files(self) -> Sequence[Path]:
        """All files that `install` writes."""

    def install(self, service: ServiceDefinition) -> Sequence[str]:
        """Write the files and start it, now and at each start of the machine. Returns what else to tell the user."""

    def uninstall(self) -> None:
        """Stop it and delete the files."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def status(self) -> ServiceStatus: ...

    def log_command(self, follow: bool, lines: int) -> Sequence[str]:
        """The command that shows the log."""


def environment_file() -> Path:
    return state_dir() / "service.env"


def log_file() -> Path:
    return state_dir() / "service.log"


def service_manager() -> ServiceManager:
    """This machine's. Raises UsageError where there is none that we know."""
    if sys.platform == "darwin":
        return Launchd(Path.home() / "Library" / "LaunchAgents" / f"{LAUNCHD_LABEL}.plist")
    if sys.platform == "linux" and shutil.which("systemctl"):
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Systemd(Path(config) / "systemd" / "user" / f"{LABEL}.service")
    raise UsageError("no systemd and no launchd here; have what starts your programs run `swarm-node join`")


@dataclass(frozen=True)
class Systemd:
    """systemd's manager of this user. unit: the file of our unit."""

    unit: Path

    def files(self) -> Sequence[Path]:
        return (self.unit, environment_file())

    def install(self, service: ServiceDefinition) -> Sequence[str]:
        _call("systemctl", "--user", "show-environment")  # before anything is written: does the manager run?
        for folder in service.folders:
            folder.mkdir(parents=True, exist_ok=True)
        _write(environment_file(), environment_text(service.secrets).encode())
        _write(self.unit, systemd_unit(service).encode())
        _call("systemctl", "--user", "daemon-reload")
        _call("systemctl", "--user", "enable", LABEL)
        _call("systemctl", "--user", "restart", LABEL, within_s=STOP_S + COMMAND_S)
        try:
            _call("loginctl", "enable-linger")
        except ResourceError:
            return ("it stops when you log out; `sudo loginctl enable-linger $USER` lets it run without you",)
        return ()

    def uninstall(self) -> None:
        if self.unit.exists():
            _call("systemctl", "--user", "disable", "--now", LABEL, within_s=STOP_S + COMMAND_S)
        for file in self.files():
            file.unlink(missing_ok=True)
        _call("systemctl", "--user", "daemon-reload")

    def start(self) -> None:
        self._must_be_installed()
        _call("systemctl", "--user", "start", LABEL)

    def stop(self) -> None:
        self._must_be_installed()
        _call("systemctl", "--user", "stop", LABEL, within_s=STOP_S + COMMAND_S)

    def status(self) -> ServiceStatus:
        if not self.unit.exists():
            return ServiceStatus(False, "not installed")
        wanted = "ActiveState,SubState,MainPID,NRestarts,ActiveEnterTimestamp,MemoryCurrent,CPUUsageNSec"
        text = _call("systemctl", "--user", "show", LABEL, f"--property={wanted}")
        shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        state = f"{shown.get('ActiveState', 'unknown')} ({shown.get('SubState', '')})"
        memory, cpu = (_number(shown.get(name, "")) for name in ("MemoryCurrent", "CPUUsageNSec"))
        return ServiceStatus(
            True,
            state,
            _number(shown.get("MainPID", "")) or 0,
            _number(shown.get("NRestarts", "")) or 0,
            shown.get("ActiveEnterTimestamp", ""),
            memory,
            None if cpu is None else cpu / 1e9,
        )

    def log_command(self, follow: bool, lines: int) -> Sequence[str]:
        return ("journalctl", "--user", "--unit", LABEL, "--lines", str(lines), *(["--follow"] if follow else []))

    def _must_be_installed(self) -> None:
        if not self.unit.exists():
            raise UsageError("no service is installed; `swarm-node service install` does that")


@dataclass(frozen=True)
class Launchd:
    """launchd's domain of this user. agent: the file of our agent."""

    agent: Path

    def files(self) -> Sequence[Path]:
        return (self.agent, log_file())

    def install(self, service: ServiceDefinition) -> Sequence[str]:
        for folder in service.folders:
            folder.mkdir(parents=True, exist_ok=True)
        if self.agent.exists():
            self.stop()
        _write(self.agent, launchd_plist(service))
        self.start()
        return () if service.max_memory is None else ("launchd has no cap on memory; the node keeps to its own",)

    def uninstall(self) -> None:
        if self.agent.exists():
            self.stop()
        for file in self.files():
            file.unlink(missing_ok=True)

    def start(self) -> None:
        self._must_be_installed()
        _call("launchctl", "bootstrap", self._domain, str(self.agent))

    def stop(self) -> None:
        self._must_be_installed()
        _call("launchctl", "bootout", f"{self._domain}/{LAUNCHD_LABEL}", within_s=STOP_S + COMMAND_S)

    def status(self) -> ServiceStatus:
        if not self.agent.exists():
            return ServiceStatus(False, "not installed")
        try:
            text = _call("launchctl", "print", f"{self._domain}/{LAUNCHD_LABEL}")
        except ResourceError:
            return ServiceStatus(True, "stopped")
        shown = dict(line.strip().split(" = ", 1) for line in text.splitlines() if " = " in line)
        runs = _number(shown.get("runs", "")) or 1
        return ServiceStatus(True, shown.get("state", "unknown"), _number(shown.get("pid", "")) or 0, runs - 1)

    def log_command(self, follow: bool, lines: int) -> Sequence[str]:
        return ("tail", "-n", str(lines), *(["-f"] if follow else []), str(log_file()))

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    def _must_be_installed(self) -> None:
        if not self.agent.exists():
            raise UsageError("no service is installed; `swarm-node service install` does that")


def _write(file: Path, content: bytes) -> None:
    """For this user's eyes alone. Raises ResourceError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(content)
        part.replace(file)
    except OSError as error:
        raise ResourceError(f"cannot write {file}: {error.strerror}") from None


def _call(*command: str, within_s: float = COMMAND_S) -> str:
    """What it printed. Raises ResourceError, with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except FileNotFoundError:
        raise ResourceError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ResourceError(f"`{' '.join(command)}` did not answer within {within_s:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise ResourceError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout


def _number(text: str) -> int | None:
    """None where a manager has no figure: systemd then says "[not set]" or the largest number."""
    return int(text) if text.isdecimal() and int(text) < 1 << 63 else None
