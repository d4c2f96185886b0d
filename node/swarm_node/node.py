"""One node from start to end: measure, join, choose layers, load, serve, drain, leave.

Owns the order of these. Everything it starts has ended when `join` returns, however it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime

from swarm.config import NodeConfig
from swarm.errors import ConnectionLost, NetworkError, NodeLeaving, SwarmError, UsageError
from swarm.messages import AnyMessage
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.transports.rate_limit import RateLimitedTransport, UploadBucket
from swarm.planner.rebalancing.policy import RebalancePolicy
from swarm.planner.rebalancing.rebalancer import RebalanceDecision, Rebalancer
from swarm.planner.schemas import placement_request_json
from swarm.types import ModelId, PeerId
from swarm_hop.serving.drain import drain_sessions, wait_for_takeover
from swarm_hop.serving.policy import DrainPolicy
from swarm_hop.serving.session_server import SessionServer
from swarm_kernels.audit.arithmetic import arithmetic
from swarm_node.membership.accounts import Accounts
from swarm_node.membership.acquaintances import Acquaintances
from swarm_node.membership.address_book import AddressBook
from swarm_node.membership.expert_sharing import ExpertSharing, Surroundings
from swarm_node.membership.hardware import Hardware, in_thread, measure
from swarm_node.membership.maintenance import MaintenanceLoop
from swarm_node.membership.record_publisher import RecordPublisher
from swarm_node.membership.rtt_monitor import RttMonitor
from swarm_node.membership.span_manager import SpanManager
from swarm_node.membership.span_selection import SpanSelector
from swarm_node.membership.status import NodeStatus
from swarm_node.membership.swarm_records import SwarmRecords
from swarm_node.membership.swarm_view import SwarmView
from swarm_node.network.connection import Connect, NodeNetwork, check_peers, over_daemon
from swarm_node.network.invite import how_to_join, make_invite
from swarm_node.owner import control_socket, prometheus
from swarm_node.owner.active_hours import ActiveHours
from swarm_node.owner.availability import OWNER, Availability
from swarm_node.owner.event_log import EventReporter
from swarm_node.owner.machine_usage import OtherCpuUsage, own_pids
from swarm_node.stopping import Stopped, first_of_group, unless_stopped


async def join(
    config: NodeConfig,
    reporter: EventReporter,
    stop: asyncio.Event,
    connect: Connect = over_daemon,
    policy: RebalancePolicy | None = None,
) -> None:
    """Serve until `stop` is set. Raises SwarmError when the node cannot start or loses the network for good.

    `policy`: when this node changes its layers to rebalance the swarm.
    """
    schedule = ActiveHours.parse(config.active_hours) if config.active_hours else None
    if config.max_sessions is not None:
        if config.max_sessions < 1:
            raise UsageError("--max-sessions must be 1 or more; `swarm-node pause` takes none at all")
        config = replace(config, limits=replace(config.limits, max_sessions=config.max_sessions))
    sentence = f"opening {config.model} and measuring this machine; the first time, it compiles its kernels too"
    reporter.event("preparing", sentence, model=config.model)
    with contextlib.suppress(Stopped):
        async with AsyncExitStack() as stack:
            hardware, network = await unless_stopped(stop, _open(config, connect, stack))
            await Node(config, reporter, hardware, network, schedule, policy).run(stop)
    reporter.event("stopped", "stopped")


async def _open(config: NodeConfig, connect: Connect, stack: AsyncExitStack) -> tuple[Hardware, NodeNetwork]:
    """Open the network and measure the machine at the same time."""
    with first_of_group():
        async with asyncio.TaskGroup() as group:
            measuring = group.create_task(in_thread(lambda: measure(config), stack), name="measure")
            network = await stack.enter_async_context(connect(config))
    return measuring.result(), network


class Node:
    """A node that has a network. `await run(stop)`, once."""

    def __init__(
        self,
        config: NodeConfig,
        reporter: EventReporter,
        hardware: Hardware,
        network: NodeNetwork,
        schedule: ActiveHours | None,
        policy: RebalancePolicy | None,
    ) -> None:
        source, limits = hardware.source, config.limits
        self._config = config
        self._reporter = reporter
        self._network = network
        self._schedule = schedule
        self._policy = policy
        self._served = ModelId(source.name, source.weight_hash, config.dtype)
        self._availability = Availability()
        upload = UploadBucket(config.upload_limit or math.inf)
        transport = RateLimitedTransport(network.transport, upload)
        self._pool = ConnectionPool(transport, self._on_frame, self._on_lost, limits, network.links, self._uses)
        self._addresses = AddressBook(lambda: self._view.snapshot())
        self._accounts = Accounts(config, transport.peer, lambda: self._view.snapshot(), network.wall_clock)
        self._server = self._session_server(arithmetic(source.config, hardware.dtype, hardware.device))
        self._spans = SpanManager(hardware, self._server, limits, reporter.loading, on_fetched=reporter.fetching)
        self._experts = self._spans.experts = self._expert_sharing(hardware)
        self._acquaintances = Acquaintances(transport.peer)
        self._rtt_monitor = RttMonitor(self._pool, transport.peer, acquaintances=self._acquaintances)
        self._status = NodeStatus(
            config,
            hardware,
            network,
            self._availability,
            self._spans,
            self._server,
            self._rtt_monitor,
            upload,
            self._accounts,
        )
        self._records = SwarmRecords(network, self._pool, config, source.name, hardware.num_layers)
        self._view = SwarmView(self._records.reader.snapshot, self._status.now)
        self._publisher = RecordPublisher(
            network.directory,
            network.sign,
            source.name,
            hardware.num_layers,
            self._status.profile,
            limits,
            network.wall_clock,
            keep_own=self._records.keep_own,
            is_known=self._records.is_known,
        )
        self._span_selector = SpanSelector(
            config,
            reporter,
            self._spans,
            snapshot=self._view.snapshot,
            profile=self._status.now,
            publish=self._publisher.publish,
            mixtures=self._experts.mixtures,
        )

    def _session_server(self, arithmetic: str) -> SessionServer:
        """`arithmetic`: what reports of audits call it."""
        server = SessionServer(
            self._served,
            self._pool,
            self._config.limits,
            on_load=lambda: self._publisher.changed(),
            addresses_of=self._addresses.of,
            places=self._accounts.places,
            on_receipt=self._accounts.on_receipt,
            sign=self._network.sign,
        )
        server.audits.arithmetic = arithmetic
        return server

    def _expert_sharing(self, hardware: Hardware) -> ExpertSharing:
        return ExpertSharing(
            hardware.source.config,
            hardware.dtype,
            self._served,
            self._pool,
            Surroundings(
                lambda: self._view.snapshot(),
                lambda: self._status.now(),
                lambda: self._publisher.changed(),
                self._reporter.event,
            ),
            self._spans.lifecycle,
            self._config.limits.dial_timeout_s,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Raises SwarmError. Withdraws our record and leaves nothing running."""
        with first_of_group():
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                await stack.enter_async_context(self._pool)
                await stack.enter_async_context(self._server)
                stack.push_async_callback(self._records.close)
                stack.push_async_callback(self._spans.close)
                background = self._start_watchers(group)
                await self._start_control(stack, stop)
                try:
                    await unless_stopped(stop, self._announce())
                    background.append(group.create_task(self._publisher.run(), name="record publisher"))
                    background.append(group.create_task(self._experts.run(), name="experts"))
                    measuring = self._rtt_monitor.run(self._view.snapshot, lambda: self._spans.lifecycle.span)
                    background.append(group.create_task(measuring, name="rtt monitor"))
                    while not stop.is_set():
                        await self._serve_cycle(stop)
                finally:
                    for task in background:
                        task.cancel()
                    self._status.update_ledger()
                    await asyncio.to_thread(self._accounts.ledger.save)
                    await self._withdraw()

    def _start_watchers(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        tasks = [
            group.create_task(self._watch_network(), name="network watch"),
            group.create_task(self._accounts.run(self._status.update_ledger), name="accounts"),
        ]
        if self._schedule is not None:
            self._availability.check_hours(self._schedule, datetime.now())
            tasks.append(group.create_task(self._availability.keep_hours(self._schedule, datetime.now), name="hours"))
        if self._config.pause_when_busy:
            usage = OtherCpuUsage(own_pids(self._network.daemon.pid))
            tasks.append(group.create_task(self._availability.watch_usage(usage), name="machine usage"))
        return tasks

    async def _start_control(self, stack: AsyncExitStack, stop: asyncio.Event) -> None:
        """Open the control socket and, if configured, the Prometheus endpoint."""
        actions = control_socket.ControlActions(
            self._pause, self._resume, lambda: _leave(stop), self._invite, self._status.metrics
        )
        await stack.enter_async_context(control_socket.serve_control(actions))
        config = self._config
        if config.metrics_port is not None:
            port = stack.enter_context(
                prometheus.serving(self._status.metrics, config.metrics_host, config.metrics_port)
            )
            sentence = f"metrics on http://{config.metrics_host}:{port}/metrics"
            self._reporter.event("metrics", sentence, host=config.metrics_host, port=port)

    async def _announce(self) -> None:
        """Accept connections, check that the configured peers serve the same model, and publish our record."""
        transport = self._network.transport
        await self._pool.serve()
        await check_peers(transport, self._config.peers, self._served)
        joining = how_to_join(self._config, self._served.model, transport.addresses)
        self._reporter.event(
            "started",
            f"node {transport.peer} for {self._served.model}; {joining}",
            **self._status.startup_facts(),
        )
        if self._availability.in_hours:
            await self._publisher.publish_until_ok()

    async def _serve_cycle(self, stop: asyncio.Event) -> None:
        """From the choice of layers to the end of their last session: until stopped, or the active hours end."""
        availability = self._availability
        if not availability.in_hours:
            await self._withdraw()
            self._reporter.event("resting", "; ".join(availability.reasons.values()))
            await unless_stopped(stop, availability.until(lambda: availability.in_hours))
            self._publisher.resume()
        await unless_stopped(stop, self._span_selector.select())
        await unless_stopped(stop, self._experts.ready(self._spans.measure))
        if self._spans.lifecycle.share is not None:
            self._server.audits.arithmetic = (
                ""  # other machines compute a part, and this one promises no bits of theirs
            )
        self._spans.serve()
        await self._publisher.publish_until_ok()
        self._report_serving()
        with contextlib.suppress(Stopped):
            await unless_stopped(stop, self._serve_while_active())
        await self._drain(leaving=stop.is_set())
        if not stop.is_set():
            await self._spans.unload()
            self._spans.lifecycle.leaving = False
            self._refuse(None)

    async def _serve_while_active(self) -> None:
        """Serve and rebalance until the active hours end."""
        maintenance = MaintenanceLoop(
            self._network,
            Rebalancer(self._network.transport.peer, self._policy),
            snapshot=self._view.compatible_snapshot,
            is_serving=lambda: self._status.movable,
            move=self._move,
            acquaintances=self._acquaintances,
        )
        with first_of_group():
            async with asyncio.TaskGroup() as group:
                maintaining = group.create_task(maintenance.run(), name="maintenance")
                await self._pause_loop()
                maintaining.cancel()

    async def _pause_loop(self) -> None:
        """Pause and resume as the owner and the machine's usage require; return when the active hours end."""
        availability = self._availability
        while True:
            await availability.until(lambda: not availability.available)
            if not availability.in_hours:
                return
            self._refuse(availability.refusal)
            self._reporter.event("paused", "paused: " + "; ".join(availability.reasons.values()))
            why = NodeLeaving("this node is paused")
            draining = asyncio.create_task(
                drain_sessions(self._server, why, self._view.coverage_by_others), name="draining"
            )
            try:
                await availability.until(lambda: availability.available or not availability.in_hours)
            finally:
                draining.cancel()
                await asyncio.wait([draining])
            if availability.available:
                self._refuse(None)
                self._reporter.event("resumed", "serves again")

    async def _drain(self, leaving: bool) -> None:
        """Wait for others to take the layers over and for every session to end, here or elsewhere, within limits."""
        limits, lifecycle = self._config.limits, self._spans.lifecycle
        lifecycle.leaving = True
        if lifecycle.span is not None and not self._server.refusing:
            with contextlib.suppress(NetworkError):  # then the others learn of it a little later
                await self._publisher.publish()
            await wait_for_takeover(
                lifecycle.span, self._view.coverage_by_others, self._view.replaceable, limits.handover_timeout_s
            )
        why = NodeLeaving("this node leaves the swarm" if leaving else "this node is outside its active hours")
        self._refuse(lambda: why)
        if self._server.sessions:
            sentence = f"finishing {self._server.sessions} sessions; once more to stop at once"
            self._reporter.event("draining", sentence)
        await drain_sessions(
            self._server,
            why,
            self._view.coverage_by_others,
            grace_s=min(DrainPolicy().grace_s, limits.drain_timeout_s),
            within_s=limits.drain_timeout_s,
        )

    async def _withdraw(self) -> None:
        """Say goodbye, to the directory and to the peers that we talk to."""
        await self._publisher.withdraw()
        await self._records.tell_goodbye()

    def _refuse(self, why: Callable[[], SwarmError] | None) -> None:
        """Refuse new sessions; None: take them again."""
        self._server.refuse(why)
        self._publisher.changed()

    async def _move(self, decision: RebalanceDecision) -> None:
        move, seen = decision.move, decision.seen
        assert move is not None  # the maintenance loop calls this only to move
        self._reporter.event(
            "moving",
            f"moves from layers {move.old} to {move.new}: {decision.reason}",
            start=move.new.start,
            end=move.new.end,
            **({} if seen is None else {"request": placement_request_json(seen)}),
        )
        await self._spans.change(move, self._view.coverage_by_others, self._publisher.changed)
        await self._publisher.publish_until_ok()
        self._report_serving()

    def _report_serving(self) -> None:
        sentence, fields = self._status.serving()
        self._reporter.event("serving", sentence, **fields)

    def _pause(self) -> str:
        self._availability.pause(OWNER, "paused by its owner")
        return "paused: takes no new sessions"

    def _resume(self) -> str:
        self._availability.resume(OWNER)
        rest = "; ".join(self._availability.reasons.values())
        return f"still paused: {rest}" if rest else "serves again"

    def _invite(self) -> str:
        return make_invite(self._config, self._served.model, self._network.transport.addresses).token()

    async def _watch_network(self) -> None:
        await self._network.failed.wait()
        raise ConnectionLost(
            "the network is gone: the p2p daemon died again and again, or could not be started; start the node again"
        )

    async def _on_frame(self, link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        if not (self._records.on_frame(link, message, body) or self._experts.on_frame(link, message, body)):
            await self._server.on_frame(link, message, body)

    def _uses(self, peer: PeerId) -> bool:
        """Whether what runs here needs the connections with `peer`."""
        return self._server.uses(peer) or self._experts.uses(peer)

    async def _on_lost(self, link: MigratableLink, error: NetworkError) -> None:
        self._experts.on_lost(link.peer)
        await self._server.on_lost(link, error)


def _leave(stop: asyncio.Event) -> str:
    stop.set()
    return "leaving: takes no new sessions, and ends when the last one has gone on elsewhere or finished"
