"""What a service manager is told about the node, as text: a systemd user unit, a launchd property list.

Pure functions. Writing the files and calling the manager is `manager`'s.
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LABEL = "swarm-node"
LAUNCHD_LABEL = "org.swarm-llm.swarm-node"
PROGRAM_BYTES = 2 << 30  # that a node's process may take besides what --max-memory says: Python, torch, connections
STOP_S = 90  # to hand sessions on or finish them
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


@dataclass(frozen=True)
class ServiceDefinition:
    """The command line, what it may write to, and its caps.

    secrets: environment variables that nobody else may read; they go to `environment_file`. max_memory: bytes of
    weights, keys and values (`--max-memory`), None for no cap. cpu_percent: of one core, None for no cap.
    """

    command: Sequence[str]
    folders: Sequence[Path]
    log_file: Path
    environment_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    max_memory: int | None = None
    cpu_percent: int | None = None


def systemd_unit(service: ServiceDefinition) -> str:
    """A unit of the user's own manager (systemd.service(5), systemd.exec(5)).

    It starts again after a crash, a kill or a swarm that was not there, ever more slowly, and not after `swarm-node
    leave`. Other programs of the machine come first. It may write to its own folders only.
    """
    lines = [
        "[Unit]",
        "Description=swarm-node: lends this machine to a swarm that serves a language model",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        "ExecStart=" + " ".join(_systemd_word(word) for word in service.command),
        *(f"Environment={_systemd_word(f'{name}={value}', False)}" for name, value in service.environment.items()),
        f"EnvironmentFile=-{_systemd_path(service.environment_file)}",
        "Restart=on-failure",
        "RestartSec=10",
        "RestartSteps=6",  # systemd 254; older managers say that they do not know it, and wait 10 s each time
        "RestartMaxDelaySec=300",
        "KillMode=mixed",  # the p2p daemon is ended by the node, or with it
        f"TimeoutStopSec={STOP_S}",
        "",
        "# The owner does not notice it.",
        "Nice=19",
        "CPUSchedulingPolicy=batch",
        "CPUWeight=1",
        "IOSchedulingClass=idle",
        "IOWeight=1",
        "OOMScoreAdjust=500",
        *([f"CPUQuota={service.cpu_percent}%"] if service.cpu_percent is not None else []),
        *([f"MemoryMax={service.max_memory + PROGRAM_BYTES}"] if service.max_memory is not None else []),
        "",
        "# It reads what its user may read, and writes to its own folders.",
        "NoNewPrivileges=yes",
        "PrivateUsers=yes",  # what the next four need in a user's manager
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "PrivateTmp=yes",
        "ReadWritePaths=" + " ".join(_systemd_path(folder) for folder in service.folders),
        "ProtectKernelTunables=yes",
        "ProtectControlGroups=yes",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "SystemCallArchitectures=native",
        "UMask=0077",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def environment_text(variables: Mapping[str, str]) -> str:
    """Lines of an EnvironmentFile (systemd.exec(5)). Values must not have line breaks."""
    return "".join(f'{name}="{_escaped(value)}"\n' for name, value in variables.items())


def launchd_plist(service: ServiceDefinition) -> bytes:
    """A LaunchAgent (launchd.plist(5)). launchd has no memory and CPU caps that hold for such a process, and no file
    for the environment: secrets are in the list itself, which its user alone may read."""
    return plistlib.dumps(
        {
            "Label": LAUNCHD_LABEL,
            "ProgramArguments": list(service.command),
            "EnvironmentVariables": {**service.environment, **service.secrets},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 30,
            "ExitTimeOut": STOP_S,
            "ProcessType": "Background",
            "LowPriorityIO": True,
            "Nice": 19,
            "Umask": 0o077,
            "StandardOutPath": str(service.log_file),
            "StandardErrorPath": str(service.log_file),
        }
    )


def _systemd_word(word: str, variables: bool = True) -> str:
    """One word of a command line, without specifiers (%) and, on a command line, variables ($)."""
    word = word.replace("%", "%%")
    if variables:
        word = word.replace("$", "$$")
    return word if _PLAIN.fullmatch(word) else f'"{_escaped(word)}"'


def _systemd_path(path: Path) -> str:
    text = str(path).replace("%", "%%")
    return text if _PLAIN.fullmatch(text) else f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
