"""What this node looks like, to the swarm and to its owner: the profile in its record, and its vitals.

Owns how these are put together from the parts that know, and how the swarm around is read. Decides and changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import swarm
from swarm.config import NodeConfig
from swarm.errors import Infeasible
from swarm.net.security.identity import verify
from swarm.net.transports.rate_limit import UploadBucket
from swarm.planner.rebalancing.target import target_allocation
from swarm.planner.scheduling.layer_time import LayerTimeEstimator
from swarm.records import to_snapshot
from swarm.types import LayerSpan, ModelId, NodeProfile, NodeState, Snapshot, coverage
from swarm_node.membership.hardware import Hardware
from swarm_node.membership.lifecycle import Lifecycle
from swarm_node.membership.placement import compatible
from swarm_node.membership.rtt_monitor import RttMonitor
from swarm_node.membership.span_manager import SpanManager
from swarm_node.network.connection import NodeNetwork
from swarm_node.owner.availability import Availability
from swarm_node.owner.node_metrics import NodeMetrics
from swarm_node.serving.session_server import SessionServer


@dataclass(slots=True, eq=False)
class NodeStatus:
    config: NodeConfig
    hardware: Hardware
    network: NodeNetwork
    served: ModelId
    lifecycle: Lifecycle
    availability: Availability
    spans: SpanManager
    service: SessionServer
    links: RttMonitor
    layer_time: LayerTimeEstimator
    upload: UploadBucket
    since: float = field(default_factory=time.monotonic)

    def profile(self, now: float) -> NodeProfile:
        """What the record says, as of `now` (seconds since the epoch)."""
        standing, machine, carrier = self.lifecycle, self.hardware, self.network.transport
        span, engine = standing.span, self.spans.engine
        loaded = engine is not None and engine.span == span
        return NodeProfile(
            peer=carrier.peer,
            name=self.config.name,
            state=standing.state,
            dtype=self.served.dtype,
            weight_hash=self.served.weight_hash,
            layer_capacity=machine.capacity,
            span=span,
            addresses=carrier.addresses,
            layer_ms=(self.layer_ms,) * len(span) if span else (),
            cost=machine.calibration.cost,
            kv_capacity_tokens=standing.kv_tokens,
            kv_free_tokens=engine.cache.free_tokens if engine is not None and loaded else standing.kv_tokens,
            sessions=self.service.sessions,
            region=self.config.region,
            link_ms=self.links.link_ms,
            version=swarm.__version__,
            pinned=bool(self.config.layers),
            published_at=now,
        )

    def now(self) -> NodeProfile:
        return self.profile(self.network.wall_clock())

    @property
    def layer_ms(self) -> float:
        """τ: what a layer would take for a token of one session more."""
        return self.layer_time.ms(self.service.sessions, time.monotonic())

    async def snapshot(self) -> Snapshot:
        """The swarm of our model now. Raises NetworkError."""
        found = await self.network.directory.read(self.served.model)
        return to_snapshot(found, self.served.model, self.network.wall_clock(), verify, self.hardware.num_layers)

    async def compatible_snapshot(self) -> Snapshot:
        """The nodes that could be in one chain with this one, and this one as it is now. Raises NetworkError."""
        return compatible(await self.snapshot(), self.now())

    async def coverage_by_others(self) -> Callable[[LayerSpan], bool]:
        """-> whether other nodes serve all these layers. Raises NetworkError."""
        others = [
            n
            for n in (await self.compatible_snapshot()).serving()
            if n.peer != self.network.transport.peer and not n.departing
        ]
        held = coverage((node.span for node in others if node.span is not None), self.hardware.num_layers)
        return lambda span: all(held[layer] for layer in span)

    async def replaceable(self) -> bool:
        """Whether the others could hold the model without us. Raises NetworkError."""
        view = await self.compatible_snapshot()
        others = tuple(node for node in view.nodes if node.peer != self.network.transport.peer)
        try:
            target_allocation(replace(view, nodes=others))
        except Infeasible:
            return False
        return True

    def startup_facts(self) -> dict[str, Any]:
        carrier, machine = self.network.transport, self.hardware
        return {
            "peer": carrier.peer,
            "addresses": list(carrier.addresses),
            "layer_capacity": machine.capacity,
            "threads": machine.calibration.threads,
        }

    def serving(self) -> tuple[str, dict[str, Any]]:
        """A sentence and its facts, for whoever started us."""
        span, tokens, layer_ms = self.lifecycle.span, self.lifecycle.kv_tokens, self.layer_ms
        assert span is not None  # a node that serves has layers
        threads = self.hardware.calibration.threads
        sentence = f"serves layers {span}: {layer_ms:.3f} ms a layer with {threads} threads, room for {tokens} tokens"
        facts = {"start": span.start, "end": span.end, "layer_ms": round(layer_ms, 4), "kv_tokens": tokens}
        return sentence, {**self.startup_facts(), **facts}

    def metrics(self) -> NodeMetrics:
        profile, counters = self.now(), self.service.counters
        return NodeMetrics(
            pid=os.getpid(),
            name=profile.name,
            peer=profile.peer,
            address=profile.addresses[0] if profile.addresses else "",
            model=self.served.model,
            dtype=profile.dtype,
            version=profile.version,
            state=str(NodeState(profile.state)),
            paused=tuple(self.availability.reasons.values()),
            start=profile.span.start if profile.span else None,
            end=profile.span.end if profile.span else None,
            layer_ms=self.layer_ms,
            layer_capacity=profile.layer_capacity,
            kv_capacity_tokens=profile.kv_capacity_tokens,
            kv_free_tokens=profile.kv_free_tokens,
            open_sessions=profile.sessions,
            max_sessions=self.config.limits.max_sessions,
            up_s=time.monotonic() - self.since,
            tasks=len(asyncio.all_tasks()),
            sessions=counters.sessions,
            refused=counters.refused,
            failed=counters.failed,
            steps=counters.steps,
            tokens=counters.tokens,
            protocol_errors=counters.protocol_errors,
            sent_bytes=self.upload.sent,
            moves=self.spans.moves,
            daemon_restarts=self.network.daemon.restarts(),
        )
