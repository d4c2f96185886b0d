"""A chain of real node processes over emulated WAN links, and a client as far away: shared by the WAN benchmarks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from swarm.config import DEFAULT_MODEL, ClientConfig
from swarm.net.dht.directory import DhtDirectory
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.transports.multi import MultiTransport
from swarm.testing.emulated_link import EmulatedTransport, LinkShape
from swarm_client import SwarmClient
from swarm_client.network.connection import ClientNetwork
from swarm_node.owner import control_socket

START_TIMEOUT_S = 180.0


def equal_spans(layers: int, hops: int) -> list[str]:
    """`hops` spans that differ by at most one layer, as `--layers` takes them."""
    edges = [round(i * layers / hops) for i in range(hops + 1)]
    return [f"{a}:{b}" for a, b in itertools.pairwise(edges)]


class ShapedSwarm:
    """A node process of one thread for each of `spans`, every one `delay_ms` from all others. A context manager.

    `slower`: each takes so many times as long as this machine would, by its own calibration.
    """

    def __init__(
        self,
        spans: list[str],
        delay_ms: float,
        *,
        dtype: str = "fp32",
        model: str = DEFAULT_MODEL,
        slower: float = 1.0,
    ) -> None:
        self._spans, self._delay_ms, self._dtype, self._model = spans, delay_ms, dtype, model
        self._slower = slower
        self._processes: list[subprocess.Popen[str]] = []
        self.address = ""

    def __enter__(self) -> ShapedSwarm:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the nodes would outlive us
        try:
            first = self._start(self._spans[0])
            self.address = _wait_for(first, "started")["addresses"][0]
            others = [self._start(span, "--peer", self.address) for span in self._spans[1:]]
            for process in [first, *others]:
                _wait_for(process, "serving")
                threading.Thread(target=_drain, args=(process,), daemon=True).start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()

    async def sent_bytes(self) -> int:
        """What the nodes have sent since they started, as they count it."""
        pids = {process.pid for process in self._processes}
        return sum(node.metrics.sent_bytes for node in await control_socket.find() if node.metrics.pid in pids)

    def _start(self, span: str, *more: str) -> subprocess.Popen[str]:
        script = str(Path(__file__).with_name("emulated_node.py"))
        command = [sys.executable, script, "--model", self._model, "--layers", span, "--dtype", self._dtype]
        command += ["--delay-ms", str(self._delay_ms), "--slower", str(self._slower), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._processes.append(process)
        return process


@asynccontextmanager
async def far_client(
    address: str,
    delay_ms: float,
    *,
    model: str = DEFAULT_MODEL,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[SwarmClient]:
    """A client `delay_ms` from every node; `settings` go to ClientConfig, `options` to SwarmClient."""
    config = ClientConfig(peers=(address,), model=model, **(settings or {}))
    async with AsyncExitStack() as stack:
        transport = await MultiTransport.start(Identity.generate(), HostOptions(peers=(address,)), accept=False)
        emulated = EmulatedTransport(transport, LinkShape(send_delay_s=delay_ms / 1e3))
        stack.push_async_callback(emulated.close)
        directory = await DhtDirectory.start(transport.daemon, (address,), client=True)
        stack.push_async_callback(directory.close)
        network = ClientNetwork.from_transport(emulated, directory, config.limits)
        await stack.enter_async_context(network.pool)
        yield await stack.enter_async_context(SwarmClient(config=config, network=network, **options))


def _wait_for(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """The event `name`. Raises RuntimeError when the node ends, or takes too long to get there."""
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
    finally:
        timer.cancel()
    raise RuntimeError(f"a node ended before it was {name}")


def _drain(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for _ in process.stdout:
        pass
