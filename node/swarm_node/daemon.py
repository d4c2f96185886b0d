"""One node from start to end: measure, join, choose layers, load, serve, drain, leave.

Owns the order of these and the node's standing (its state and span). Everything it starts is gone when `join` returns,
however it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import swarm
from swarm.config import NodeConfig
from swarm.errors import ConnectionLost, NetworkError, SwarmError
from swarm.messages import AnyMessage
from swarm.net.identity import verify
from swarm.net.link import Link
from swarm.net.pool import ConnectionPool
from swarm.records import to_snapshot
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_kernels.calibrate import self_check
from swarm_kernels.span_loading import load_span
from swarm_node import placement
from swarm_node.announcer import Announcer
from swarm_node.engine import SpanEngine
from swarm_node.executor import Executor, ThreadDevice
from swarm_node.links import Links
from swarm_node.machine import Machine, measure
from swarm_node.network import Connect, Network, check_peers, over_daemon
from swarm_node.placement import Placement
from swarm_node.profiler import LayerTime
from swarm_node.report import Reporter
from swarm_node.service import Served, Service

logger = logging.getLogger(__name__)

SETTLE_S = 1.0  # a node's choice of layers must stand for so long before it acts on it
SETTLE_AT_MOST_S = 4.0
SETTLE_POLL_S = 0.2

T = TypeVar("T")


class Stopped(SwarmError):
    """The node was asked to stop while it was starting."""

    code = "stopped"
    exit_code = 0


@dataclass(slots=True)
class Standing:
    """Where this node is in its life; the one place that says so."""

    state: NodeState = NodeState.JOINING
    span: LayerSpan | None = None
    kv_tokens: int = 0


async def join(config: NodeConfig, report: Reporter, stop: asyncio.Event, connect: Connect = over_daemon) -> None:
    """Serve until `stop` is set. Raises SwarmError when the node cannot start or loses the network for good."""
    sentence = f"opening {config.model} and measuring this machine; the first time, it compiles its kernels too"
    report.event("preparing", sentence, model=config.model)
    with contextlib.suppress(Stopped):
        async with AsyncExitStack() as stack:
            machine, network = await _unless(stop, _open(config, connect, stack))
            await Node(config, report, machine, network).run(stop)
    report.event("stopped", "stopped")


async def _open(config: NodeConfig, connect: Connect, stack: AsyncExitStack) -> tuple[Machine, Network]:
    """Open the network and measure the machine at the same time."""
    try:
        async with asyncio.TaskGroup() as group:
            measuring = group.create_task(_measure(config, stack), name="measure")
            network = await stack.enter_async_context(connect(config))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return measuring.result(), network


async def _measure(config: NodeConfig, stack: AsyncExitStack) -> Machine:
    """Measure in a thread; whoever gives up on it does not leave the model's files open."""
    abandoned = threading.Event()

    def work() -> Machine:
        machine = measure(config)
        if abandoned.is_set():
            machine.source.close()
        return machine

    try:
        machine = await asyncio.to_thread(work)
    except asyncio.CancelledError:
        abandoned.set()
        raise
    stack.callback(machine.source.close)
    return machine


class Node:
    """A node that has a network. `await run(stop)`, once."""

    def __init__(self, config: NodeConfig, report: Reporter, machine: Machine, network: Network) -> None:
        source = machine.source
        self._config = config
        self._report = report
        self._machine = machine
        self._network = network
        self._served = Served(source.name, source.weight_hash, config.dtype)
        self._standing = Standing()
        self._engine: SpanEngine | None = None
        self._layer_time = LayerTime(machine.calibration.cost.at(1))
        self._announcer = Announcer(
            network.directory, network.sign, source.name, machine.num_layers, self.profile, config.limits
        )
        self._pool = ConnectionPool(network.carrier, self._on_frame, self._on_lost, config.limits)
        self._service = Service(self._served, self._pool, config.limits, on_load=self._announcer.changed)
        self._links = Links(self._pool, network.carrier.peer)

    async def run(self, stop: asyncio.Event) -> None:
        """Raises SwarmError. Leaves the directory without our record, and nothing running."""
        try:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                await stack.enter_async_context(self._pool)
                await stack.enter_async_context(self._service)
                background = [group.create_task(self._watch(), name="network watch")]
                try:
                    await _unless(stop, self._appear())
                    background.append(group.create_task(self._announcer.run(), name="announcer"))
                    engine = await _unless(stop, self._settle())
                    await self._serve(engine, stack)
                    measuring = self._links.run(self.snapshot, lambda: self._standing.span)
                    background.append(group.create_task(measuring, name="links"))
                    await stop.wait()
                    await self._drain()
                finally:
                    for task in background:
                        task.cancel()
                    await self._announcer.withdraw()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    def profile(self, now: float) -> NodeProfile:
        """What the record says, as of `now` (seconds since the epoch)."""
        standing, machine, carrier = self._standing, self._machine, self._network.carrier
        span = standing.span
        return NodeProfile(
            peer=carrier.peer,
            name=self._config.name,
            state=standing.state,
            dtype=self._served.dtype,
            weight_hash=self._served.weight_hash,
            layer_capacity=machine.capacity,
            span=span,
            addresses=carrier.addresses,
            layer_ms=(self._layer_time.ms,) * len(span) if span else (),
            cost=machine.calibration.cost,
            kv_capacity_tokens=standing.kv_tokens,
            kv_free_tokens=self._engine.cache.free_tokens if self._engine else standing.kv_tokens,
            sessions=self._service.sessions,
            region=self._config.region,
            link_ms=self._links.link_ms,
            version=swarm.__version__,
            pinned=bool(self._config.layers),
            published_at=now,
        )

    async def snapshot(self) -> Snapshot:
        """The swarm of our model now. Raises NetworkError."""
        found = await self._network.directory.read(self._served.model)
        return to_snapshot(found, self._served.model, time.time(), verify, self._machine.num_layers)

    async def _appear(self) -> None:
        """Answer whoever dials us, make sure that the peers we were given are of our kind, and say that we are here."""
        carrier = self._network.carrier
        await self._pool.serve()
        self._report.event(
            "started",
            f"node {carrier.peer} for {self._served.model}; others join with --peer {carrier.addresses[0]}",
            peer=carrier.peer,
            addresses=list(carrier.addresses),
            layer_capacity=self._machine.capacity,
            threads=self._machine.calibration.threads,
        )
        await check_peers(carrier, self._config.peers, self._served)
        await self._announcer.publish()

    async def _settle(self) -> SpanEngine:
        """Choose layers and load them, again if others turn out to have chosen the same ones at the same moment."""
        while True:
            placed = await self._choose()
            await self._claim(placed)
            engine = await self._load(placed.span)
            if self._config.layers or placement.still_wanted(await self.snapshot(), self.profile(time.time())):
                return engine
            logger.warning("other nodes took layers %s at the same moment; choosing again", placed.span)
            self._standing.state, self._standing.span = NodeState.JOINING, None
            await self._announcer.publish()

    async def _choose(self) -> Placement:
        """The layers to take, once the choice has stood for a while: then all that join now have seen each other."""
        if self._config.layers:
            return placement.asked(self._config.layers, self._machine.num_layers)
        loop = asyncio.get_running_loop()
        begun = since = loop.time()
        choice = placement.choose(await self.snapshot(), self.profile(time.time()))
        while self._config.peers and loop.time() < min(begun + SETTLE_AT_MOST_S, since + SETTLE_S):
            await asyncio.sleep(SETTLE_POLL_S)
            before, choice = choice, placement.choose(await self.snapshot(), self.profile(time.time()))
            if choice.span != before.span:
                since = loop.time()
        return choice

    async def _claim(self, placed: Placement) -> None:
        """Tell the swarm which layers we take, before we spend the time to load them. Raises OutOfMemory."""
        weights, standing = self._machine.weights, self._standing
        most = self._config.limits.max_sessions * weights.context
        standing.kv_tokens = weights.kv_tokens(self._machine.budget, placed.span, most)
        standing.span, standing.state = placed.span, NodeState.LOADING
        await self._announcer.publish()
        self._report.event(
            "placed",
            f"takes {placed.reason}",
            start=placed.span.start,
            end=placed.span.end,
            reason=placed.reason,
        )

    async def _load(self, span: LayerSpan) -> SpanEngine:
        machine, kv_tokens = self._machine, self._standing.kv_tokens
        abandoned = threading.Event()

        def progress(share: float) -> None:
            if abandoned.is_set():
                raise Stopped("stopped while loading")
            self._report.loading(share)

        def load() -> SpanEngine:
            loaded = load_span(machine.source, span, machine.dtype, machine.device, progress)
            self_check(loaded, machine.source)
            return SpanEngine(loaded, loaded.new_cache(kv_tokens))

        try:
            return await asyncio.to_thread(load)
        finally:
            abandoned.set()

    async def _serve(self, engine: SpanEngine, stack: AsyncExitStack) -> None:
        executor = Executor(engine, ThreadDevice(), self._config.limits.batch_tokens, self._layer_time.observe)
        stack.push_async_callback(executor.close)
        self._engine = engine
        self._standing.state = NodeState.SERVING
        self._service.begin(engine, executor)
        await self._announcer.publish()
        self._report.event(
            "serving",
            f"serves layers {engine.span}: {self._layer_time.ms:.3f} ms a layer with "
            f"{self._machine.calibration.threads} threads, room for {engine.cache.capacity_tokens} tokens",
            peer=self._network.carrier.peer,
            addresses=list(self._network.carrier.addresses),
            start=engine.span.start,
            end=engine.span.end,
            layer_ms=round(self._layer_time.ms, 4),
            kv_tokens=engine.cache.capacity_tokens,
        )

    async def _drain(self) -> None:
        """Finish the sessions that are open, within reason."""
        self._standing.state = NodeState.DRAINING
        self._announcer.changed()
        if self._service.sessions:
            self._report.event("draining", f"finishing {self._service.sessions} sessions; once more to stop at once")
        try:
            async with asyncio.timeout(self._config.limits.drain_timeout_s):
                await self._service.drain()
        except TimeoutError:
            logger.warning("%d sessions did not end in time and are cut off", self._service.sessions)

    async def _watch(self) -> None:
        await self._network.failed.wait()
        raise ConnectionLost("the network is gone because the p2p daemon died; start the node again")

    async def _on_frame(self, connection: Link, message: AnyMessage, body: memoryview) -> None:
        await self._service.on_frame(connection, message, body)

    async def _on_lost(self, connection: Link, error: NetworkError) -> None:
        await self._service.on_lost(connection, error)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What one sentence can be about: the first error raised on purpose, else the first."""
    on_purpose = errors.subgroup(SwarmError) or errors
    error: BaseException = on_purpose
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or Stopped as soon as `stop` is set; then `work` is cancelled and has ended."""
    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work)
            stopping = group.create_task(stop.wait())
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            working.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    if working.cancelled():
        raise Stopped("stopped while starting")
    return working.result()
