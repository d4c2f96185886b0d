"""The owner's control of a running node: a unix socket in the state folder, one JSON line each way.

    -> {"do": "pause" | "resume" | "leave" | "status" | "invite"}
    <- {"ok": true, "message": "...", "metrics": {...}}

Owns the socket, and how to find those of the nodes on this machine. What the commands do is in `swarm_node.node`. Only
the owner of the folder (mode 0700) and of the sockets (0600) has access.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from swarm.config import state_dir
from swarm.errors import SwarmError, UsageError
from swarm_node.owner.node_metrics import NodeMetrics

logger = logging.getLogger(__name__)

Command = Literal["pause", "resume", "leave", "status", "invite"]

MAX_LINE = 1 << 16
MAX_CALLERS = 8
REPLY_TIMEOUT_S = 5.0
MAX_SOCKET_PATH = 100  # bytes; systems allow 104 to 108


class ControlRequest(msgspec.Struct, frozen=True):
    do: Command


class ControlReply(msgspec.Struct, frozen=True):
    ok: bool
    message: str
    metrics: NodeMetrics | None = None


_decode_request = msgspec.json.Decoder(ControlRequest).decode
_decode_reply = msgspec.json.Decoder(ControlReply).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ControlActions:
    """What the commands do; each returns a sentence (`invite`: a token), or raises SwarmError."""

    pause: Callable[[], str]
    resume: Callable[[], str]
    leave: Callable[[], str]
    invite: Callable[[], str]
    metrics: Callable[[], NodeMetrics]


def folder() -> Path:
    return state_dir() / "nodes"


@asynccontextmanager
async def serve_control(actions: ControlActions) -> AsyncIterator[None]:
    """Answer on `<pid>.sock` until the block ends. Without a socket the node goes on, and logs a warning."""
    path = folder() / f"{os.getpid()}.sock"
    server = _Server(actions)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a process that had our number before us
        with _short(path) as name:
            listener = await asyncio.start_unix_server(server.serve, name, limit=MAX_LINE)
        path.chmod(0o600)
    except OSError as error:
        logger.warning(
            "no control socket at %s: %s; `swarm-node pause` and the like cannot reach this node", path, error
        )
        yield
        return
    try:
        yield
    finally:
        listener.close()
        await server.close()
        _unlink(path)


class _Server:
    def __init__(self, actions: ControlActions) -> None:
        self._actions = actions
        self._callers: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller, a command after the other."""
        task = asyncio.current_task()
        assert task is not None
        self._callers.add(task)
        try:
            while len(self._callers) <= MAX_CALLERS and (line := await reader.readline()):
                writer.write(_encode(self._reply_to(line)) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError) as error:  # ValueError: a line over the limit
            logger.info("a caller of the control socket was cut off: %s", error)
        finally:
            self._callers.discard(task)
            writer.close()

    def _reply_to(self, line: bytes) -> ControlReply:
        try:
            request = _decode_request(line)
        except (msgspec.DecodeError, RecursionError) as error:
            return ControlReply(False, f"not a command: {error}")
        actions = self._actions
        act = {"pause": actions.pause, "resume": actions.resume, "leave": actions.leave, "invite": actions.invite}.get(
            request.do
        )
        try:
            message = act() if act is not None else ""
        except SwarmError as error:
            return ControlReply(False, str(error), actions.metrics())
        return ControlReply(True, message, actions.metrics())

    async def close(self) -> None:
        for task in self._callers:
            task.cancel()
        if self._callers:
            await asyncio.wait(self._callers)


# The other side -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A node that runs on this machine."""

    path: Path
    metrics: NodeMetrics


async def find() -> list[LocalNode]:
    """The nodes of this user on this machine, by process id. The sockets of dead ones are removed."""
    found = []
    for path in sorted(folder().glob("*.sock")):
        reply = await request(path, "status")
        if reply is not None and reply.metrics is not None:
            found.append(LocalNode(path, reply.metrics))
    return sorted(found, key=lambda node: node.metrics.pid)


async def choose(name: str | None) -> LocalNode:
    """The node called `name`, a name or process id; None: the only one. Raises UsageError."""
    nodes = await find()
    if not nodes:
        raise UsageError("no node runs on this machine under this user; start one with `swarm-node join`")
    matching = [n for n in nodes if name is None or name in (n.metrics.name, str(n.metrics.pid), n.metrics.peer)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(f"{n.metrics.pid} ({n.metrics.name or 'without a name'})" for n in nodes)
    if not matching:
        raise UsageError(f"no node here is called '{name}'; there are {names}")
    raise UsageError(f"several nodes run here; say which with --node NAME or PID: {names}")


async def request(path: Path, command: Command) -> ControlReply | None:
    """Send a command; None if no node answers."""
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            with _short(path) as name:
                reader, writer = await asyncio.open_unix_connection(name, limit=MAX_LINE)
    except ConnectionRefusedError:  # its node was killed
        _unlink(path)
        return None
    except (OSError, TimeoutError):
        return None
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            writer.write(_encode(ControlRequest(command)) + b"\n")
            return _decode_reply(await reader.readline())
    except (OSError, TimeoutError, msgspec.DecodeError, ValueError):
        return None
    finally:
        writer.close()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for `path` that fits into a socket address. Raises OSError where there is none."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        yield str(path)
        return
    if sys.platform != "linux":
        raise OSError(f"{path} is too long for a unix socket; set SWARM_HOME to a shorter folder")
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
