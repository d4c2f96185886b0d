"""A private swarm on this machine: several `swarm-node join` processes on 127.0.0.1, started and stopped together.

Owns the processes. The nodes choose their layers unless `--layers` is given; their output is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.config import Limits, local_swarm_file
from swarm.errors import SwarmError, UsageError
from swarm.net.base.tls_addresses import is_direct
from swarm.net.libp2p.socket_dir import SocketDir
from swarm.net.security.identity import Identity
from swarm.types import LayerSpan, coverage, missing_ranges
from swarm_node.commands.local_gateway import gateway_beside
from swarm_node.commands.runner import die_with_parent

WAIT_FOR_FIRST_S = 60.0  # that a node tries to reach the first one
STOP_S = Limits().handover_timeout_s + Limits().drain_timeout_s + 10.0
HARD_STOP_S = 5.0


class NodeDied(SwarmError):
    """A node process ended unexpectedly; carries its own error code and sentence."""

    def __init__(self, message: str, code: str = "node_died") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class LocalOptions:
    nodes: int
    spans: tuple[LayerSpan, ...]  # one a node, or none
    model: str
    flags: tuple[str, ...]  # passed on to each node
    as_json: bool = False
    verbose: bool = False
    gateway_port: int | None = None  # of a gateway beside it; 0: any; None: no gateway

    @classmethod
    def checked(
        cls,
        nodes: int | None,
        layers: str | None,
        model: str,
        flags: Sequence[str],
        as_json: bool,
        verbose: bool,
        gateway_port: int | None = None,
    ) -> LocalOptions:
        """Raises UsageError."""
        spans = tuple(LayerSpan.parse(part) for part in layers.split(",")) if layers else ()
        count = nodes or len(spans) or 3
        if spans and len(spans) != count:
            raise UsageError(f"--layers gives {len(spans)} spans for {count} nodes; give one for each")
        if spans:
            _check_covered(spans, max(span.end for span in spans))
        return cls(count, spans, model, tuple(flags), as_json, verbose, gateway_port)


@dataclass(slots=True, eq=False)
class Child:
    """One node process and its output so far."""

    number: int
    process: Process
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    addresses: tuple[str, ...] = ()
    error: dict[str, Any] | None = None
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    def died(self) -> NodeDied:
        if self.error is not None:
            return NodeDied(f"node {self.number}: {self.error['message']}", str(self.error["error"]))
        text = " / ".join(self.stderr) or "without output"
        return NodeDied(f"node {self.number} ended with code {self.process.returncode}: {text}")


async def run(options: LocalOptions, stop: asyncio.Event) -> None:
    """Serve until `stop` is set or the last node has ended. Raises NodeDied when one cannot start."""
    if options.spans:
        _check_covered(options.spans, await asyncio.to_thread(_num_layers, options.model))
    swarm = LocalSwarm(options)
    with SocketDir() as folder:
        try:
            await swarm.start(folder)
            if await swarm.serving(stop):
                with _announced(options.model, swarm.addresses):
                    swarm.report_ready()
                    async with _gateway(options, swarm, stop):
                        await swarm.ended(stop)
        except asyncio.CancelledError:
            await swarm.stop(HARD_STOP_S, hard=True)
            raise
        finally:
            await swarm.stop(STOP_S)
    swarm.report("stopped", "all nodes have stopped")


def _gateway(options: LocalOptions, swarm: LocalSwarm, stop: asyncio.Event) -> AbstractAsyncContextManager[None]:
    if options.gateway_port is None:
        return contextlib.nullcontext()
    port, verbose = options.gateway_port, options.verbose
    return gateway_beside(options.model, swarm.addresses, port, stop, swarm.report, verbose)


def _num_layers(model: str) -> int:
    """Raises ModelError."""
    from swarm_kernels.models.open import open_model  # imports torch: seconds

    source = open_model(model)
    try:
        return source.config.num_layers
    finally:
        source.close()


def _check_covered(spans: Sequence[LayerSpan], num_layers: int) -> None:
    """Raises UsageError if the spans are not the whole model."""
    missing = missing_ranges(coverage(spans, num_layers))
    if missing:
        ranges = ", ".join(f"{start}:{end}" for start, end in missing)
        raise UsageError(f"--layers leaves out {ranges}; give the nodes every layer of the model")


class LocalSwarm:
    """The node processes. `stop` leaves none behind."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._children: list[Child] = []
        self._readers: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> list[str]:
        """Of each node: a libp2p address, and a direct one for clients that have no libp2p."""
        found = []
        for child in self._children:
            direct = next(filter(is_direct, child.addresses), "")
            found += [address for address in dict.fromkeys((*child.addresses[:1], direct)) if address]
        return found

    async def start(self, folder: Path) -> None:
        """Start all nodes at once; the first has a known address, and the others keep trying to reach it."""
        first, port = Identity.generate(), _free_port()
        first.save(folder / "identity")
        address = f"/ip4/127.0.0.1/tcp/{port}"
        for i in range(self._options.nodes):
            command = [sys.executable, "-m", "swarm_node.commands.cli", "join", "--json", "--name", f"local-{i}"]
            command += ["--model", self._options.model, *self._options.flags]
            if self._options.spans:
                command += ["--layers", str(self._options.spans[i])]
            else:
                command += ["--model-fraction", f"1/{self._options.nodes}"]
            if i == 0:
                command += ["--identity", str(folder / "identity"), "--listen", address]
            else:
                command += ["--peer", f"{address}/p2p/{first.peer}", "--join-timeout", str(WAIT_FOR_FIRST_S)]
                command += ["--listen", "/ip4/127.0.0.1/tcp/0"]
            await self._spawn(i, command)

    async def _spawn(self, number: int, command: Sequence[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # Ctrl-C is for us; we stop them
            env={name: value for name, value in os.environ.items() if name != "SWARM_PRIVATE"},  # a secret for each
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        child = Child(number, process)
        self._children.append(child)
        self._readers.append(asyncio.create_task(self._read_events(child), name=f"node {number} events"))
        self._readers.append(asyncio.create_task(self._read_errors(child), name=f"node {number} errors"))

    async def serving(self, stop: asyncio.Event) -> bool:
        """Wait until all nodes serve; False when asked to stop before. Raises NodeDied."""
        waits = [asyncio.create_task(self._serving(child)) for child in self._children]
        stopping = asyncio.create_task(stop.wait())
        try:
            pending: set[asyncio.Task[Any]] = set(waits)
            while pending and not stopping.done():
                done, pending = await asyncio.wait({*pending, stopping}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    task.result()
                pending.discard(stopping)
            return not stopping.done()
        finally:
            for task in (*waits, stopping):
                task.cancel()

    async def _serving(self, child: Child) -> None:
        ended = asyncio.create_task(child.process.wait())
        served = asyncio.create_task(child.serving.wait())
        try:
            await asyncio.wait((ended, served), return_when=asyncio.FIRST_COMPLETED)
            if not child.serving.is_set():
                await asyncio.sleep(0.1)  # for its error on stdout and stderr
                raise child.died()
        finally:
            ended.cancel()
            served.cancel()

    async def ended(self, stop: asyncio.Event) -> None:
        """Wait until asked to stop, or until no node is left."""
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        alive: dict[asyncio.Task[Any], Child] = {
            asyncio.create_task(child.process.wait()): child for child in self._children
        }
        try:
            while alive and not stopping.done():
                done, _ = await asyncio.wait({*alive, stopping}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    child = alive.pop(task)
                    if not stopping.done():
                        self.report("died", str(child.died()), node=child.number)
        finally:
            for task in (stopping, *alive):
                task.cancel()

    async def stop(self, timeout_s: float, hard: bool = False) -> None:
        """Ask all nodes to end, then make them. `hard`: they need not finish their sessions. Idempotent."""
        alive = [child.process for child in self._children if child.process.returncode is None]
        for process in alive:
            for _ in range(2 if hard else 1):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.05 if hard else 0)
        if alive:
            await asyncio.wait([asyncio.create_task(p.wait()) for p in alive], timeout=timeout_s)
        for process in alive:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._readers:
            await asyncio.wait(self._readers)

    def report_ready(self) -> None:
        pids = [child.process.pid for child in self._children]
        addresses = self.addresses
        self.report(
            "ready",
            f"\nThe swarm is ready. Talk to it:\n\n  swarm-chat\n\nor from elsewhere:\n\n"
            f"  swarm-chat --model {self._options.model} --peer {addresses[0]}\n\nCtrl-C stops it.",
            peers=addresses,
            pids=pids,
            model=self._options.model,
        )

    def report(self, event: str, sentence: str, **fields: Any) -> None:
        if self._options.as_json:
            sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        else:
            sys.stdout.write(sentence + "\n")
        sys.stdout.flush()

    async def _read_events(self, child: Child) -> None:
        """Pass on the events of a node."""
        assert child.process.stdout is not None
        while line := await child.process.stdout.readline():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            name = event.pop("event", "")
            if name == "error":
                child.error = event
                continue
            if name == "serving":
                child.addresses = tuple(event["addresses"])
                child.serving.set()
            message = event.pop("message", "")
            if name != "loading" or self._options.as_json:
                self.report(name, f"[node {child.number}] {message}", node=child.number, **event)

    async def _read_errors(self, child: Child) -> None:
        assert child.process.stderr is not None
        while line := await child.process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            child.stderr.append(text)
            if self._options.verbose:
                sys.stderr.write(f"[node {child.number}] {text}\n")


@contextlib.contextmanager
def _announced(model: str, peers: Sequence[str]) -> Iterator[None]:
    """Where `swarm-chat` and `swarm-node status` look when they are given no peer."""
    file = local_swarm_file()
    content = json.dumps({"model": model, "peers": list(peers), "pid": os.getpid()})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; set SWARM_HOME to a writable folder") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if file.read_text(encoding="utf-8") == content:  # unless a later swarm replaced it
                file.unlink()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
