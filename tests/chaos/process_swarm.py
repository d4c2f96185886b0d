"""Real node processes that can be killed, stopped, throttled and started again one by one.

    async with ProcessSwarm(home, spans) as swarm:
        swarm.nodes[0].kill(); await swarm.nodes[0].start(); ...

Owns the processes; nothing of them outlives the block. Knows nothing of what is asked of the swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from swarm.types import LayerSpan, PeerId

START_TIMEOUT_S = 240.0
START_ATTEMPTS = 3
PR_SET_PDEATHSIG = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """In the child: a run that is cut off leaves no nodes behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Place:
    """Where a process runs: the address that others reach it by, and the command that brings it there."""

    address: str = "127.0.0.1"
    enter: Sequence[str] = ()


HERE = Place()


@dataclass(eq=False)
class NodeProcess:
    """One `swarm-node join` with pinned layers, an identity on disk and a port of its own, so that it can come back."""

    number: int
    span: LayerSpan
    home: Path
    flags: Sequence[str]
    others: list[str]  # addresses to join by; shared by all, each adds its own
    place: Place = HERE
    port: int = field(default_factory=free_port)
    peer: PeerId = ""
    process: Process | None = None
    failed_starts: list[str] = field(default_factory=list)
    _reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, if need be again, and wait until it serves. Raises RuntimeError with its last words."""
        for attempt in range(START_ATTEMPTS):
            try:
                return await self._start()
            except RuntimeError as error:
                await self.kill()
                self.failed_starts.append(str(error))
                if attempt + 1 == START_ATTEMPTS:
                    raise
        return None

    async def _start(self) -> None:
        peers = [flag for address in self.others if f"/tcp/{self.port}/" not in address for flag in ("--peer", address)]
        command = [
            *self.place.enter,
            sys.executable,
            "-m",
            "swarm_node.commands.cli",
            "join",
            "--json",
            "--layers",
            str(self.span),
            *self.flags,
        ]
        command += ["--identity", str(self.home / f"node{self.number}.key"), *peers]
        environment = {
            **os.environ,
            "SWARM_HOME": str(self.home),
            "SWARM_LISTEN": f"/ip4/{self.place.address}/tcp/{self.port}",
        }
        with (self.home / f"node{self.number}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.PIPE, stderr=log, env=environment, preexec_fn=_die_with_parent
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                event = await self._until("serving")
        except TimeoutError:
            raise RuntimeError(f"node {self.number} did not serve within {START_TIMEOUT_S:.0f} s") from None
        self.peer = event["peer"]
        if event["addresses"][0] not in self.others:
            self.others.append(event["addresses"][0])
        self._reading = asyncio.create_task(self._drain())

    async def _until(self, name: str) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        event: dict[str, Any] = {}
        async for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == name:
                return event
        raise RuntimeError(f"node {self.number} ended with {await self.process.wait()}: {event}")

    async def _drain(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        while await self.process.stdout.readline():
            """Nobody reads on, and a full pipe would stop it."""

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()
        if self._reading is not None:
            await self._reading

    async def throttle(self, share: float, period_s: float = 0.05) -> None:
        """Let it run only so much of the time, until cancelled."""
        try:
            while True:
                self.signal(signal.SIGSTOP)
                await asyncio.sleep(period_s * (1 - share))
                self.signal(signal.SIGCONT)
                await asyncio.sleep(period_s * share)
        finally:
            self.signal(signal.SIGCONT)

    def children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process is not None:
                return list(psutil.Process(self.process.pid).children(recursive=True))
        return []


class ProcessSwarm:
    """`replicas` nodes for each of `spans`, all fp32 with one thread. `places`: where each runs, by its number."""

    def __init__(
        self,
        home: Path,
        spans: Sequence[LayerSpan],
        replicas: int = 2,
        model: str = "smollm2-135m",
        places: Callable[[int], Place] = lambda number: HERE,
        more_flags: Sequence[str] = (),
    ) -> None:
        flags = ("--model", model, "--dtype", "fp32", "--threads", "1", "--join-timeout", "60", *more_flags)
        self.addresses: list[str] = []
        self.nodes = [
            NodeProcess(number, span, home, flags, self.addresses, places(number))
            for number, span in enumerate(span for span in spans for _ in range(replicas))
        ]

    async def __aenter__(self) -> ProcessSwarm:
        try:
            await self.nodes[0].start()
            await asyncio.gather(*(node.start() for node in self.nodes[1:]))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = [child for node in self.nodes for child in node.children()]
        for node in self.nodes:
            node.signal(signal.SIGCONT)
            await node.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def node(self, peer: PeerId) -> NodeProcess:
        return next(node for node in self.nodes if node.peer == peer)
