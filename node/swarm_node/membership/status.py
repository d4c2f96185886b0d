"""What this node publishes in its record, and the metrics it shows to its owner.

Owns how these are put together from the other parts. Decides and changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any

import swarm
from swarm.config import NodeConfig
from swarm.net.transports.rate_limit import UploadBucket
from swarm.types import NodeProfile, NodeState
from swarm_hop.serving.session_server import SessionServer
from swarm_node.membership.accounts import Accounts
from swarm_node.membership.hardware import Hardware
from swarm_node.membership.rtt_monitor import RttMonitor
from swarm_node.membership.span_manager import SpanManager
from swarm_node.network.connection import NodeNetwork
from swarm_node.owner.availability import Availability
from swarm_node.owner.node_metrics import NodeMetrics


@dataclass(slots=True, eq=False)
class NodeStatus:
    config: NodeConfig
    hardware: Hardware
    network: NodeNetwork
    availability: Availability
    spans: SpanManager
    server: SessionServer
    rtt_monitor: RttMonitor
    upload: UploadBucket
    accounts: Accounts
    since: float = field(default_factory=time.monotonic)
    _counted: tuple[int, float, int] = (0, 0.0, 0)  # layer tokens, seconds, bytes that the ledger has

    def profile(self, now: float) -> NodeProfile:
        """The content of our record, as of `now` (seconds since the epoch)."""
        lifecycle, transport, served = self.spans.lifecycle, self.network.transport, self.server.served
        span, engine = lifecycle.span, self.spans.engine
        loaded = engine is not None and engine.span == span
        return NodeProfile(
            peer=transport.peer,
            name=self.config.name,
            state=self.state,
            dtype=served.dtype,
            weight_hash=served.weight_hash,
            layer_capacity=self.hardware.capacity,
            span=span,
            addresses=transport.addresses,
            layer_ms=(self.spans.layer_ms,) * len(span) if span else (),
            cost=self.spans.cost,
            kv_capacity_tokens=lifecycle.kv_tokens,
            kv_free_tokens=self.server.free_tokens(engine, engine.cache.free_tokens)
            if engine is not None and loaded
            else lifecycle.kv_tokens,
            sessions=self.server.sessions,
            region=self.config.region,
            link_ms=self.rtt_monitor.link_ms,
            version=swarm.__version__,
            pinned=bool(self.config.layers) or lifecycle.share is not None,
            identity_proof=self.network.identity_proof(),
            owners=self.accounts.owner_tags,
            experts=lifecycle.share,
            expert_room=self.hardware.expert_room,
            lead_room=self.hardware.lead_room,
            drafter=engine.tail_drafts.offered if engine is not None and loaded and engine.tail_drafts else None,
            published_at=now,
        )

    def now(self) -> NodeProfile:
        return self.profile(self.network.wall_clock())

    @property
    def state(self) -> NodeState:
        return self.spans.lifecycle.state(self.server.refusing)

    @property
    def movable(self) -> bool:
        """Whether it serves layers that rebalancing may exchange for others."""
        return self.state is NodeState.SERVING and self.spans.lifecycle.share is None

    def startup_facts(self) -> dict[str, Any]:
        transport = self.network.transport
        return {
            "peer": transport.peer,
            "addresses": list(transport.addresses),
            "layer_capacity": self.hardware.capacity,
            "threads": self.hardware.calibration.threads,
        }

    def serving(self) -> tuple[str, dict[str, Any]]:
        """A sentence and the fields of the "serving" event."""
        lifecycle, layer_ms = self.spans.lifecycle, self.spans.layer_ms
        span, tokens, share = lifecycle.span, lifecycle.kv_tokens, lifecycle.share
        threads = self.hardware.calibration.threads
        if span is None:
            assert share is not None  # a node that serves has layers, or experts of some
            facts = {"start": share.layers.start, "end": share.layers.end, "experts": [share.first, share.end]}
            return f"computes {share} for nodes that lead them, with {threads} threads", {
                **self.startup_facts(),
                **facts,
            }
        led = "" if share is None else f" with experts {share.first}:{share.end} of {share.count} and other nodes'"
        sentence = (
            f"serves layers {span}{led}: {layer_ms:.3f} ms a layer with {threads} threads, room for {tokens} tokens"
        )
        facts = {"start": span.start, "end": span.end, "layer_ms": round(layer_ms, 4), "kv_tokens": tokens}
        return sentence, {**self.startup_facts(), **facts}

    def update_ledger(self) -> None:
        """Count what was done since the last call."""
        now = (self.server.counters.layer_tokens, self.spans.compute_s, self.upload.sent)
        before, self._counted = self._counted, now
        self.accounts.ledger.served(now[0] - before[0], now[1] - before[1], now[2] - before[2])

    def metrics(self) -> NodeMetrics:
        self.update_ledger()
        profile, counters, given = self.now(), self.server.counters, self.accounts.ledger.given
        shares = [session.share for session in self.server.live()]
        return NodeMetrics(
            pid=os.getpid(),
            name=profile.name,
            peer=profile.peer,
            address=profile.addresses[0] if profile.addresses else "",
            model=self.server.served.model,
            dtype=profile.dtype,
            version=profile.version,
            state=str(NodeState(profile.state)),
            paused=tuple(self.availability.reasons.values()),
            start=profile.span.start if profile.span else None,
            end=profile.span.end if profile.span else None,
            experts=str(profile.experts or ""),
            waits_for="" if self.spans.experts is None else self.spans.experts.waits_for,
            layer_ms=self.spans.layer_ms,
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
            given_layer_tokens=given.layer_tokens,
            given_compute_s=given.compute_s,
            given_bytes=given.sent_bytes,
            acknowledged_layer_tokens=given.acknowledged,
            acknowledging_clients=len(given.clients),
            owner_sessions=sum(share.first for share in shares),
            favored_sessions=sum(share.weight > 1.0 for share in shares),
            contributors=len(self.accounts.contributors),
            times=counters.times,
        )
