"""`swarm-node service`: the node as a service of this user, started with the machine.

Owns flags and sentences. The managers are `service.manager`'s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from swarm.command_line import program
from swarm.command_line.old_flags import arguments
from swarm.errors import UsageError
from swarm_node.commands import flags
from swarm_node.commands.runner import exit_on_error

if TYPE_CHECKING:
    from swarm.config import NodeConfig
    from swarm_node.service.definition import ServiceDefinition
    from swarm_node.service.footprint import Written
    from swarm_node.service.manager import ServiceStatus

app = typer.Typer(
    name="service",
    help="Run the node in the background, from each start of the machine on (systemd, launchd).",
    no_args_is_help=True,
    **program.SETTINGS,
)
_SECRETS = ("--secret", "--invite")  # read from the environment instead, where `ps` does not show them

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Everything = Annotated[
    bool, typer.Option("--all", help="Also what swarm keeps in its folders: models, kernels, measurements, history.")
]
CpuLimit = Annotated[
    int | None,
    typer.Option(metavar="PERCENT", min=1, max=100_000, help="Of one core, at most; 150 is a core and a half. [none]"),
]


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(app)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def install(ctx: typer.Context, cpu_limit: CpuLimit = None, dry_run: DryRun = False) -> None:
    """Install and start it, with the flags of `swarm-node join`, as in `service install --gpu 0 --invite TOKEN`."""
    with exit_on_error(False):
        from swarm_node.service.definition import systemd_unit
        from swarm_node.service.manager import service_manager

        given = arguments(ctx.args)
        service = _definition(given, _config_of(ctx, given), cpu_limit)
        if dry_run:
            sys.stdout.write(systemd_unit(service))
            return
        notes = service_manager().install(service)
        for note in notes:
            sys.stdout.write(f"note: {note}\n")
        sys.stdout.write("installed and started; `swarm-node service status` shows it, `service logs` what it says\n")


@app.command()
def uninstall(everything: Everything = False, dry_run: DryRun = False) -> None:
    """Stop the service and delete it; with --all also what else swarm has written to its folders."""
    with exit_on_error(False):
        from swarm_node.service import footprint
        from swarm_node.service.manager import service_manager

        manager = service_manager()
        found = footprint.written(manager.files())
        goes = found if everything else [entry for entry in found if entry.path in manager.files()]
        if dry_run:
            _show(goes, [entry for entry in found if entry not in goes])
            return
        manager.uninstall()
        footprint.delete(goes)
        _show(goes, [entry for entry in found if entry not in goes], "deleted")


@app.command()
def start() -> None:
    """Start the installed service."""
    with exit_on_error(False):
        from swarm_node.service.manager import service_manager

        service_manager().start()
        sys.stdout.write("started\n")


@app.command()
def stop() -> None:
    """Stop the service until the next start of the machine; its sessions go on at other nodes, or finish first."""
    with exit_on_error(False):
        from swarm_node.service.manager import service_manager

        service_manager().stop()
        sys.stdout.write("stopped\n")


@app.command()
def status(as_json: flags.Json = False) -> None:
    """Whether the service runs, since when, and what it takes of this machine. `swarm-node status` shows the swarm."""
    with exit_on_error(as_json):
        import msgspec

        from swarm_node.service.manager import service_manager

        found = service_manager().status()
        sys.stdout.write((msgspec.json.encode(found).decode() if as_json else _sentence(found)) + "\n")


@app.command()
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what it says.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines.")] = 100,
) -> None:
    """Show what the service said."""
    with exit_on_error(False):
        from swarm_node.service.manager import service_manager

        command = service_manager().log_command(follow, lines)
        if shutil.which(command[0]) is None:
            raise UsageError(f"{command[0]} is not installed")
        raise typer.Exit(subprocess.run(command, check=False).returncode)


@dataclass(frozen=True)
class _Split:
    command: Sequence[str]
    secrets: dict[str, str]


def _config_of(ctx: typer.Context, given: Sequence[str]) -> NodeConfig:
    """What `join` would make of these words. Raises UsageError, or click's errors."""
    root = cast(TyperGroup, ctx.find_root().command)
    join: Any = root.commands["join"]
    with join.make_context("join", list(given), parent=ctx.find_root()) as parsed:
        return flags.config_of(parsed.params)


def _definition(given: Sequence[str], config: NodeConfig, cpu_limit: int | None) -> ServiceDefinition:
    from huggingface_hub import constants

    from swarm.config import data_dir, state_dir
    from swarm_node.service.definition import ServiceDefinition
    from swarm_node.service.manager import environment_file, log_file

    split = _without_secrets(given)
    if "--private" in split.command:  # one secret for all its starts
        split = _Split([word for word in split.command if word != "--private"], {"SWARM_SECRET": config.secret})
    identity = () if config.identity is not None else ("--identity", str(state_dir() / "service.identity"))
    folders = [data_dir(), state_dir(), Path(constants.HF_HUB_CACHE)]
    if config.identity is not None:
        folders.append(config.identity.absolute().parent)
    inherited = {name: os.environ[name] for name in ("SWARM_HOME", "HF_HOME", "HF_TOKEN_PATH") if name in os.environ}
    return ServiceDefinition(
        command=[sys.executable, "-m", "swarm_node", "join", *split.command, *identity],
        folders=folders,
        log_file=log_file(),
        environment_file=environment_file(),
        environment=inherited,
        secrets=split.secrets,
        max_memory=config.max_memory,
        cpu_percent=cpu_limit,
    )


def _without_secrets(given: Sequence[str]) -> _Split:
    """The command line without secrets, and these as variables."""
    left: list[str] = []
    secrets: dict[str, str] = {}
    words = iter(given)
    for word in words:
        flag, joined, value = word.partition("=")
        if flag in _SECRETS:
            secrets[f"SWARM_{flag[2:].upper()}"] = value if joined else next(words)
        else:
            left.append(word)
    return _Split(left, secrets)


def _sentence(found: ServiceStatus) -> str:
    if not found.installed:
        return "not installed"
    parts = [found.state]
    if found.pid:
        parts.append(f"process {found.pid}" + (f" since {found.since}" if found.since else ""))
    if found.restarts:
        parts.append(f"restarted {found.restarts} {'time' if found.restarts == 1 else 'times'}")
    if found.memory is not None:
        parts.append(f"{found.memory / 1e6:.0f} MB")
    if found.cpu_s is not None:
        parts.append(f"{found.cpu_s:.0f} s of CPU time")
    return ", ".join(parts)


def _show(goes: Sequence[Written], stays: Sequence[Written], done: str = "would be deleted") -> None:
    for title, entries in ((done, goes), ("stays (`--all` deletes it too)", stays)):
        if entries:
            sys.stdout.write(f"{title}:\n")
        for entry in entries:
            sys.stdout.write(f"  {entry.nbytes / 1e6:9.1f} MB  {entry.path}  ({entry.what})\n")
    if not goes:
        sys.stdout.write("nothing to delete\n")
