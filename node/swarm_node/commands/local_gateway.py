"""The gateway beside a private swarm: one `swarm-gateway` process, started when the swarm serves, stopped before it.

Owns the process. It is another package's program and nothing of it is imported: its JSON lines say where it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from swarm.errors import SwarmError
from swarm_node.commands.runner import die_with_parent

MODULE = "swarm_gateway.server.cli"
DEFAULT_PORT = 11435
STOP_S = 15.0  # that it may take to end its answers: its own patience is less

Report = Callable[..., None]
"""(event, sentence, **fields)"""


class GatewayDied(SwarmError):
    """The gateway's process ended before it listened; carries its own error code and sentence."""

    def __init__(self, message: str, code: str = "gateway_died") -> None:
        super().__init__(message)
        self.code = code


class _Gateway:
    def __init__(self, process: Process, verbose: bool) -> None:
        self.process = process
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._verbose = verbose
        self._error: dict[str, Any] = {}
        self._stderr: deque[str] = deque(maxlen=20)

    async def read_events(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if not isinstance(event, dict):
                continue
            if event.get("event") == "error":
                self._error = event
            elif isinstance(event.get("address"), str) and not self.address.done():
                self.address.set_result(event["address"])

    async def read_errors(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            if self._verbose:
                sys.stderr.write(f"[gateway] {text}\n")

    def died(self) -> GatewayDied:
        if self._error:
            return GatewayDied(f"the gateway: {self._error.get('message')}", str(self._error.get("error")))
        text = " / ".join(self._stderr) or "without output"
        return GatewayDied(f"the gateway ended with code {self.process.returncode}: {text}")

    async def stop(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


@asynccontextmanager
async def gateway_beside(
    model: str, peers: Sequence[str], port: int, stop: asyncio.Event, report: Report, verbose: bool = False
) -> AsyncIterator[None]:
    """A gateway to the swarm of `peers` on 127.0.0.1, inside the block; `port` 0: any. Its address is reported, and so
    is its end if it comes before the block's. Raises GatewayDied if it cannot start."""
    command = [sys.executable, "-m", MODULE, "--json", "--host", "127.0.0.1", "--port", str(port), "--model", model]
    process = await asyncio.create_subprocess_exec(
        *command,
        *(part for peer in peers for part in ("--peer", peer)),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,  # Ctrl-C is for us; we stop it
        env={name: value for name, value in os.environ.items() if name != "SWARM_PRIVATE"},
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )
    gateway = _Gateway(process, verbose)
    reading = [asyncio.create_task(gateway.read_events()), asyncio.create_task(gateway.read_errors())]
    watching = asyncio.create_task(_watch(gateway, reading, stop, report))
    try:
        await _started(gateway, watching, stop)
        yield
    finally:
        watching.cancel()
        await gateway.stop()
        await asyncio.wait((*reading, watching))


async def _started(gateway: _Gateway, watching: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Wait until it listens, or is asked to stop. Raises GatewayDied."""
    stopping = asyncio.create_task(stop.wait())
    waits: tuple[asyncio.Future[Any], ...] = (watching, gateway.address, stopping)
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if watching.done() and not gateway.address.done() and not stop.is_set():
        raise gateway.died()


async def _watch(gateway: _Gateway, reading: Sequence[asyncio.Task[None]], stop: asyncio.Event, report: Report) -> None:
    """Report its address, and its end."""
    first: tuple[asyncio.Future[Any], ...] = (gateway.address, *reading)
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if gateway.address.done():
        url = gateway.address.result().rstrip("/")
        report(
            "gateway",
            f"\nThe gateway listens. A page to chat and to watch the swarm:\n\n  {url}/\n\nFor programs that speak to "
            f"OpenAI, with any API key:\n\n  export OPENAI_BASE_URL={url}/v1\n  curl {url}/v1/models",
            address=url,
            pid=gateway.process.pid,
        )
    await asyncio.wait(reading)
    await gateway.process.wait()
    if gateway.address.done() and not stop.is_set():
        report("gateway_died", str(gateway.died()))
