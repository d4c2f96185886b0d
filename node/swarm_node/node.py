"""One node from start to end: measure, join, choose layers, load, serve, drain, leave.

Owns the order of these. Everything it starts is gone when `join` returns, however it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from swarm.config import NodeConfig
from swarm.errors import ConnectionLost, NetworkError, NodeLeaving, SwarmError, UsageError
from swarm.messages import AnyMessage
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.transports.rate_limit import RateLimitedTransport, UploadBucket
from swarm.planner.rebalancing.policy import RebalancePolicy
from swarm.planner.rebalancing.rebalancer import RebalanceDecision, Rebalancer
from swarm.planner.scheduling.layer_time import LayerTimeEstimator
from swarm.planner.schemas import placement_request_json
from swarm.types import ModelId, NodeState
from swarm_node.membership.hardware import Hardware, measure
from swarm_node.membership.lifecycle import Lifecycle
from swarm_node.membership.maintenance import MaintenanceLoop
from swarm_node.membership.record_publisher import RecordPublisher
from swarm_node.membership.rtt_monitor import RttMonitor
from swarm_node.membership.span_manager import SpanManager
from swarm_node.membership.span_selection import SpanSelector
from swarm_node.membership.status import NodeStatus
from swarm_node.network.connection import Connect, NodeNetwork, check_peers, over_daemon
from swarm_node.network.invite import how_to_join
from swarm_node.owner import control_socket, prometheus
from swarm_node.owner.active_hours import ActiveHours
from swarm_node.owner.availability import ASKED, Availability
from swarm_node.owner.event_log import EventReporter
from swarm_node.owner.machine_usage import OtherCpuUsage, own_pids
from swarm_node.serving.drain import GRACE_S, drain_sessions, wait_for_takeover
from swarm_node.serving.session_server import SessionServer

T = TypeVar("T")


class Stopped(SwarmError):
    """The node was asked to stop while it was starting."""

    code = "stopped"
    exit_code = 0


async def join(
    config: NodeConfig,
    report: EventReporter,
    stop: asyncio.Event,
    connect: Connect = over_daemon,
    policy: RebalancePolicy | None = None,
) -> None:
    """Serve until `stop` is set. Raises SwarmError when the node cannot start or loses the network for good.

    `policy`: when this node changes its layers for the swarm's sake.
    """
    schedule = ActiveHours.parse(config.active_hours) if config.active_hours else None
    if config.max_sessions is not None:
        if config.max_sessions < 1:
            raise UsageError("--max-sessions must be 1 or more; `swarm-node pause` takes none at all")
        config = replace(config, limits=replace(config.limits, max_sessions=config.max_sessions))
    sentence = f"opening {config.model} and measuring this machine; the first time, it compiles its kernels too"
    report.event("preparing", sentence, model=config.model)
    with contextlib.suppress(Stopped):
        async with AsyncExitStack() as stack:
            machine, network = await _unless(stop, _open(config, connect, stack))
            await Node(config, report, machine, network, schedule, policy).run(stop)
    report.event("stopped", "stopped")


async def _open(config: NodeConfig, connect: Connect, stack: AsyncExitStack) -> tuple[Hardware, NodeNetwork]:
    """Open the network and measure the machine at the same time."""
    try:
        async with asyncio.TaskGroup() as group:
            measuring = group.create_task(_measure(config, stack), name="measure")
            network = await stack.enter_async_context(connect(config))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return measuring.result(), network


async def _measure(config: NodeConfig, stack: AsyncExitStack) -> Hardware:
    """Measure in a thread; whoever gives up on it does not leave the model's files open."""
    abandoned = threading.Event()

    def work() -> Hardware:
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

    def __init__(
        self,
        config: NodeConfig,
        report: EventReporter,
        machine: Hardware,
        network: NodeNetwork,
        schedule: ActiveHours | None,
        policy: RebalancePolicy | None,
    ) -> None:
        source, limits = machine.source, config.limits
        self._config = config
        self._report = report
        self._network = network
        self._schedule = schedule
        self._served = ModelId(source.name, source.weight_hash, config.dtype)
        self._lifecycle = Lifecycle()
        self._availability = Availability()
        layer_time = LayerTimeEstimator(machine.calibration.cost)
        upload = UploadBucket(config.upload_limit or math.inf)
        carrier = RateLimitedTransport(network.transport, upload)
        self._pool = ConnectionPool(carrier, self._on_frame, self._on_lost, limits)
        self._service = SessionServer(self._served, self._pool, limits, on_load=lambda: self._publisher.changed())
        self._span_manager = SpanManager(
            machine,
            self._service,
            self._lifecycle,
            limits,
            observe=lambda stats: layer_time.observe(stats, time.monotonic()),
            progress=report.loading,
        )
        self._links = RttMonitor(self._pool, carrier.peer)
        self._status = NodeStatus(
            config,
            machine,
            network,
            self._served,
            self._lifecycle,
            self._availability,
            self._span_manager,
            self._service,
            self._links,
            layer_time,
            upload,
        )
        self._publisher = RecordPublisher(
            network.directory,
            network.sign,
            source.name,
            machine.num_layers,
            self._status.profile,
            limits,
            network.wall_clock,
        )
        self._span_selector = SpanSelector(
            config,
            report,
            self._span_manager,
            snapshot=self._status.snapshot,
            profile=self._status.now,
            publish=self._publisher.publish,
        )
        self._policy = policy

    async def run(self, stop: asyncio.Event) -> None:
        """Raises SwarmError. Leaves the directory without our record, and nothing running."""
        try:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                await stack.enter_async_context(self._pool)
                await stack.enter_async_context(self._service)
                stack.push_async_callback(self._span_manager.close)
                background = self._watches(group)
                await self._start_control(stack, stop)
                try:
                    await _unless(stop, self._announce())
                    background.append(group.create_task(self._publisher.run(), name="announcer"))
                    measuring = self._links.run(self._status.snapshot, lambda: self._lifecycle.span)
                    background.append(group.create_task(measuring, name="links"))
                    while not stop.is_set():
                        await self._serve_cycle(stop)
                finally:
                    for task in background:
                        task.cancel()
                    await self._publisher.withdraw()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    def _watches(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        tasks = [group.create_task(self._watch(), name="network watch")]
        if self._schedule is not None:
            self._availability.check_hours(self._schedule, datetime.now())
            tasks.append(group.create_task(self._availability.keep_hours(self._schedule, datetime.now), name="hours"))
        if self._config.pause_when_busy:
            use = OtherCpuUsage(own_pids(self._network.daemon.pid))
            tasks.append(group.create_task(self._availability.watch_use(use), name="use of the machine"))
        return tasks

    async def _start_control(self, stack: AsyncExitStack, stop: asyncio.Event) -> None:
        """What the owner can reach this node by."""
        actions = control_socket.ControlActions(self._pause, self._resume, lambda: _leave(stop), self._status.metrics)
        await stack.enter_async_context(control_socket.serve_control(actions))
        config = self._config
        if config.metrics_port is not None:
            port = stack.enter_context(
                prometheus.serving(self._status.metrics, config.metrics_host, config.metrics_port)
            )
            sentence = f"metrics on http://{config.metrics_host}:{port}/metrics"
            self._report.event("metrics", sentence, host=config.metrics_host, port=port)

    async def _announce(self) -> None:
        """Answer whoever dials us, make sure that the peers we were given are of our kind, and say that we are here."""
        carrier, portrait = self._network.transport, self._status
        await self._pool.serve()
        await check_peers(carrier, self._config.peers, self._served)
        joining = how_to_join(self._config, self._served.model, carrier.addresses)
        self._report.event(
            "started",
            f"node {carrier.peer} for {self._served.model}; {joining}",
            **portrait.startup_facts(),
        )
        if self._availability.hours:
            await self._publisher.publish_until_ok()

    async def _serve_cycle(self, stop: asyncio.Event) -> None:
        """From the choice of layers to the end of their last session: until asked to stop, or the hours are over."""
        duty = self._availability
        if not duty.hours:
            await self._publisher.withdraw()
            self._report.event("resting", "; ".join(duty.reasons.values()))
            await _unless(stop, duty.until(lambda: duty.hours))
            self._publisher.resume()
        await _unless(stop, self._span_selector.select())
        self._span_manager.serve()
        await self._publisher.publish_until_ok()
        self._tell_serving()
        with contextlib.suppress(Stopped):
            await _unless(stop, self._serve_while_active())
        await self._drain(leaving=stop.is_set())
        if not stop.is_set():
            await self._span_manager.rest()
            self._lifecycle.leaving = False
            self._close(None)

    async def _serve_while_active(self) -> None:
        """Serve and keep up with the swarm until the hours are over."""
        upkeep = MaintenanceLoop(
            self._network,
            Rebalancer(self._network.transport.peer, self._policy),
            look=self._status.compatible_snapshot,
            settled=lambda: self._lifecycle.state is NodeState.SERVING,
            move=self._move,
        )
        try:
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(upkeep.run(), name="upkeep")
                await self._pause_loop()
                keeping.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _pause_loop(self) -> None:
        """Pause and go on as our owner, and the use of the machine, will have it; return when the hours are over."""
        duty = self._availability
        while True:
            await duty.until(lambda: not duty.on)
            if not duty.hours:
                return
            self._close(duty.refusal)
            self._report.event("paused", "paused: " + "; ".join(duty.reasons.values()))
            why = NodeLeaving("this node is paused")
            clearing = asyncio.create_task(
                drain_sessions(self._service, why, self._status.coverage_by_others), name="clearing"
            )
            try:
                await duty.until(lambda: duty.on or not duty.hours)
            finally:
                clearing.cancel()
                await asyncio.wait([clearing])
            if duty.on:
                self._close(None)
                self._report.event("resumed", "serves again")

    async def _drain(self, leaving: bool) -> None:
        """Have others take over, and every session end, here or elsewhere, within reason."""
        limits, span = self._config.limits, self._lifecycle.span
        self._lifecycle.leaving = True
        if span is not None and not self._lifecycle.closed:
            with contextlib.suppress(NetworkError):  # then the others learn of it a little later
                await self._publisher.publish()
            portrait = self._status
            await wait_for_takeover(span, portrait.coverage_by_others, portrait.replaceable, limits.handover_timeout_s)
        why = NodeLeaving("this node leaves the swarm" if leaving else "this node lends its machine at other hours")
        self._close(lambda: why)
        if self._service.sessions:
            self._report.event("draining", f"finishing {self._service.sessions} sessions; once more to stop at once")
        grace_s = min(GRACE_S, limits.drain_timeout_s)
        await drain_sessions(
            self._service, why, self._status.coverage_by_others, grace_s=grace_s, within_s=limits.drain_timeout_s
        )

    def _close(self, why: Callable[[], SwarmError] | None) -> None:
        """Take no new session; None: take them again."""
        self._lifecycle.closed = why is not None
        self._service.refuse(why)
        self._publisher.changed()

    async def _move(self, decision: RebalanceDecision) -> None:
        move, seen = decision.move, decision.seen
        assert move is not None  # upkeep asks for nothing else
        self._report.event(
            "moving",
            f"moves from layers {move.old} to {move.new}: {decision.reason}",
            start=move.new.start,
            end=move.new.end,
            **({} if seen is None else {"request": placement_request_json(seen)}),
        )
        await self._span_manager.change(move, self._status.coverage_by_others, self._publisher.changed)
        await self._publisher.publish_until_ok()
        self._tell_serving()

    def _tell_serving(self) -> None:
        sentence, fields = self._status.serving()
        self._report.event("serving", sentence, **fields)

    def _pause(self) -> str:
        self._availability.stop(ASKED, "paused by its owner")
        return "paused: takes no new sessions"

    def _resume(self) -> str:
        self._availability.resume(ASKED)
        rest = "; ".join(self._availability.reasons.values())
        return f"still paused: {rest}" if rest else "serves again"

    async def _watch(self) -> None:
        await self._network.failed.wait()
        raise ConnectionLost(
            "the network is gone: the p2p daemon died again and again, or could not be started; start the node again"
        )

    async def _on_frame(self, link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        await self._service.on_frame(link, message, body)

    async def _on_lost(self, link: MigratableLink, error: NetworkError) -> None:
        await self._service.on_lost(link, error)


def _leave(stop: asyncio.Event) -> str:
    stop.set()
    return "leaving: takes no new sessions, and ends when the last one has gone on elsewhere or finished"


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
