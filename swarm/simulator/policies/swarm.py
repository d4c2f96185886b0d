"""Our own swarm: phase 1, phase 2, repair, join and rebalance as nodes and clients call them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarm.planner.placement.allocation import Objective, allocate
from swarm.planner.placement.join import join_span, place_joiners
from swarm.planner.placement.water_filling import PoolNode
from swarm.planner.rebalancing.imbalance import judge_spans
from swarm.planner.rebalancing.migration import MigrationPlan
from swarm.planner.rebalancing.policy import POLICY
from swarm.planner.rebalancing.target import target_allocation
from swarm.planner.routing.repair import repair
from swarm.planner.trust.evidence import FailureKind
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimSession
from swarm.simulator.policy import ReplayPlan, ServingPolicy, alive, covered
from swarm.simulator.scenario import Scenario
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Chain, LayerSpan, PeerId

BLOCKED_MS = 30000.0  # how long a client leaves out a node that it has given up, as `PeerBlocklist` does


class SwarmPolicy(ServingPolicy):
    """Parallax's two phases on live data; every decision is a function of `swarm.planner`."""

    def __init__(self, scenario: Scenario, network: NetworkModel) -> None:
        super().__init__(scenario, network)
        self._given_up: dict[str, dict[PeerId, float]] = {}  # client -> node -> when

    def place(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        """Phase 1 over all nodes; those it has no use for join at the bottleneck, one after the other."""
        nodes = [node for node in alive(view) if node.capacity > 0]
        allocation = allocate(view.num_layers, [_pool_node(node) for node in nodes], self._objective(nodes, view))
        spans = {hop.peer: hop.span for replica in allocation.replicas for hop in replica}
        tokens = [0.0] * view.num_layers
        for peer, span in spans.items():
            _add(tokens, view.nodes[peer], span)
        for peer in allocation.unused:
            spans[peer] = join_span(tokens, view.nodes[peer].capacity, slide=True)
            _add(tokens, view.nodes[peer], spans[peer])
        covered(spans, view.num_layers)
        return spans

    def _objective(self, nodes: list[SimNode], view: StaleSnapshot) -> Objective:
        idle = math.fsum(node.cost.curve.ms_at(1) for node in nodes) / len(nodes)
        some = nodes[:32]
        links = [self.network.latency(a.id, b.id) for a in some for b in some if a is not b]
        hop_ms = math.fsum(links) / len(links) if links else 0.0
        return Objective(compute_ms=view.num_layers * idle, hop_ms=hop_ms, alpha=self.spec.alpha)

    def join(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        """A joining node reads the directory, which still lists nodes that have just left."""
        return place_joiners(view.take(self.scenario.serving.record_lifetime_ms))

    def rebalance(self, view: StaleSnapshot) -> MigrationPlan | None:
        """By the planner's two triggers; for imbalance alone only if it falls by the policy's `min_gain`."""
        snapshot = view.take()
        nodes = {n.peer: n for n in snapshot.nodes}
        verdict = judge_spans(nodes, {n.peer: n.span for n in snapshot.nodes if n.span}, view.num_layers)
        if not verdict.rebalance:
            return None
        found = target_allocation(snapshot)
        gap = verdict.reason.startswith("coverage")
        return found.plan if gap or found.after.cv <= (1 - POLICY.min_gain) * found.before.cv else None

    def choose(self, session: SimSession, view: StaleSnapshot) -> Chain:
        table = view.table(session.most_tokens)
        return table.route(client_ms=view.client_ms(session.request.client), banned=self.banned(session, view))

    def failed(self, session: SimSession, peer: PeerId, kind: FailureKind, now: float) -> None:
        self._given_up.setdefault(session.request.client, {})[peer] = now

    def banned(self, session: SimSession, view: StaleSnapshot) -> set[PeerId]:
        """The nodes that the session's client leaves out."""
        given_up = self._given_up.get(session.request.client, {})
        return session.banned | {peer for peer, at in given_up.items() if view.now - at < BLOCKED_MS}

    def repair(self, session: SimSession, view: StaleSnapshot) -> ReplayPlan:
        intact = Chain(tuple(hop for hop in session.hops if hop.peer in session.ready))
        found = repair(
            view.table(session.most_tokens),
            intact,
            (),
            client_ms=view.client_ms(session.request.client),
            banned=self.banned(session, view),
        )
        return ReplayPlan(found)


def _pool_node(node: SimNode) -> PoolNode:
    return PoolNode(node.id, node.capacity, 1.0 / node.cost.curve.ms_at(1), node.cost.device.region)


def _add(tokens: list[float], node: SimNode, span: LayerSpan) -> None:
    room = node.cost.kv_room(span.start, span.end) / (len(span) * node.cost.model.kv_token_bytes)
    for layer in span:
        tokens[layer] += max(room, 1.0)
