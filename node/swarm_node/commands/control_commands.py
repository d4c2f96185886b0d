"""`swarm-node pause | resume | leave`: the owner of this machine controls a node that runs on it.

Owns flags and sentences. How the node is found and reached is in `owner.control_socket`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import psutil
import typer

from swarm.errors import NetworkError
from swarm_node.commands.runner import exit_on_error, run
from swarm_node.owner import control_socket
from swarm_node.owner.control_socket import Command

LEAVE_WITHIN_S = 600.0
POLL_S = 0.1

Node = Annotated[
    str | None, typer.Option("--node", metavar="NAME", help="Its name or process id, if several run here. [the one]")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a sentence.")]


def add_to(app: typer.Typer) -> None:
    for command in (pause, resume, leave):
        app.command()(command)


def pause(node: Node = None, as_json: Json = False) -> None:
    """Have the node on this machine take no new sessions; those that are open go on elsewhere, or finish."""
    with exit_on_error(as_json):
        run(lambda stop: _send("pause", node, as_json))


def resume(node: Node = None, as_json: Json = False) -> None:
    """Have a paused node serve again."""
    with exit_on_error(as_json):
        run(lambda stop: _send("resume", node, as_json))


def leave(
    node: Node = None,
    wait: Annotated[bool, typer.Option(help="Return when the node has ended.")] = True,
    as_json: Json = False,
) -> None:
    """Have the node on this machine leave the swarm: hand its sessions on or finish them, and end."""
    with exit_on_error(as_json):
        run(lambda stop: _send("leave", node, as_json, LEAVE_WITHIN_S if wait else 0.0))


async def _send(command: Command, node: str | None, as_json: bool, within_s: float = 0.0) -> None:
    """`within_s`: wait so long for the node's process to end."""
    found = await control_socket.choose(node)
    pid, name = found.metrics.pid, found.metrics.name
    reply = await control_socket.request(found.path, command)
    if reply is None:
        raise NetworkError(f"node {pid} does not answer; it may be about to end")
    if not reply.ok:
        raise NetworkError(reply.message)
    message = reply.message
    if within_s:
        try:
            async with asyncio.timeout(within_s):
                await _ended(pid)
        except TimeoutError:
            raise NetworkError(f"node {pid} has not ended within {within_s:.0f} s: it finishes sessions") from None
        message = "it has left"
    if as_json:
        sys.stdout.write(json.dumps({"node": pid, "name": name, "message": message}) + "\n")
    else:
        sys.stdout.write(f"node {pid}{f' ({name})' if name else ''}: {message}\n")


async def _ended(pid: int) -> None:
    while psutil.pid_exists(pid):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return  # its parent has not reaped it yet
        except psutil.NoSuchProcess:
            return
        await asyncio.sleep(POLL_S)
