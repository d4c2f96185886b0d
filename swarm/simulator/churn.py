"""Churn: nodes that crash, join, and load other layers when the swarm is rebalanced.

Owns the schedule of churn. Which layers a node takes is the policy's decision.
"""

from __future__ import annotations

from swarm.errors import Infeasible
from swarm.planner.rebalancing.migration import SpanMove, layers_to_load
from swarm.simulator.des_engine import DiscreteEventEngine
from swarm.simulator.model.devices import DeviceCostModel, DeviceSpec
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.rng import NamedStream
from swarm.types import LayerSpan, NodeState

FULL_MESH_NODES = 64  # uniform networks up to this size publish the latency of every pair


class Churn:
    """Adds nodes to `engine` and removes them."""

    def __init__(self, engine: DiscreteEventEngine) -> None:
        self._engine = engine
        self._scenario = engine.scenario
        self._costs = {
            device.name: DeviceCostModel(device, engine.scenario.model) for device in engine.scenario.devices
        }
        self._random = NamedStream(engine.scenario.seed, "churn")
        self._moving = 0
        self._checks_failed = 0  # in a row: checks with a new allocation to move to
        self.joined = self.left = self.moved = 0
        self.gaps: list[tuple[float, float]] = []  # (from, to), ms: when some layer had no node
        self._gap_since: float | None = None
        self._served: dict[str, LayerSpan] = {}
        self._replicas = [0] * engine.scenario.model.layers
        self._joining: list[SimNode] = []

    # At the start ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All nodes of the scenario, with their layers, and the churn to come. Raises Infeasible."""
        scenario = self._scenario
        for device in scenario.devices:
            for _ in range(device.count):
                self._make(device)
        self._engine.attacks.begin()
        if not any(node.capacity for node in self._engine.nodes.values()):
            raise Infeasible(f"none of the machines has memory for a single layer of {scenario.model.name}")
        placed = self._engine.policy.place(self._engine.observe())
        for peer, span in placed.items():
            self._engine.nodes[peer].take_layers(span, NodeState.SERVING)
            self._engine.notify("serve", n=peer, span=str(span))
            self._recount(self._engine.nodes[peer])
        self._link()
        self._engine.published()
        churn = scenario.churn
        for period in range(churn.periods):
            self._engine.clock.at(period * churn.period_s * 1e3, self._period)
        if churn.periods and churn.rebalance_s:
            self._engine.clock.after(churn.rebalance_s * 1e3, self._check)

    def _make(self, device: DeviceSpec) -> SimNode:
        engine, serving = self._engine, self._scenario.serving
        name = f"n{len(engine.nodes):04d}-{device.name}"
        cost = self._costs[device.name]
        batch = self._scenario.policy.sessions_per_batch or serving.sessions_per_batch
        node = SimNode(
            id=name,
            cost=cost,
            capacity=cost.capacity(serving.kv_reserve_tokens),
            batch_tokens=serving.batch_tokens,
            batch_sessions=batch,
            most_sessions=serving.sessions_per_node,
            coordinate=engine.network.point(name),
            born=engine.clock.now,
        )
        engine.nodes[name] = node
        return node

    def _link(self) -> None:
        """In a small uniform network every node has measured every other."""
        nodes = list(self._engine.nodes.values())
        if self._scenario.network.kind == "uniform" and len(nodes) <= FULL_MESH_NODES:
            for node in nodes:
                node.link_ms.update({o.id: self._engine.network.latency(node.id, o.id) for o in nodes if o is not node})

    # Leaving ---------------------------------------------------------------------------------------------------------

    def _period(self) -> None:
        """Choose which nodes leave in the period that begins now, and when; and when others join."""
        churn, clock = self._scenario.churn, self._engine.clock
        present = [node for node in self._engine.nodes.values() if node.alive]
        self._random.shuffle(present)
        leaving = present[: round(churn.leave_share * len(present))]
        for node in leaving:
            clock.after(self._random.uniform(0.0, churn.period_s * 1e3), lambda node=node: self.on_crash(node))  # type: ignore[misc]
            if churn.replace:
                clock.after(self._random.uniform(0.0, churn.period_s * 1e3), self.on_join)

    def on_crash(self, node: SimNode) -> None:
        """The node vanishes without notice."""
        engine = self._engine
        node.died = engine.clock.now
        self.left += 1
        engine.notify("leave", n=node.id)
        self._count(node)
        for held in list(node.held.values()):
            session = held.session
            engine.clock.after(
                self._scenario.serving.detect_ms,
                lambda session=session: engine.chains.lost(session, node.id),  # type: ignore[misc]
            )

    # Joining ---------------------------------------------------------------------------------------------------------

    def on_join(self) -> None:
        """A new machine, its kind drawn in the proportions of the scenario; it measures itself first."""
        devices = [device for device in self._scenario.devices for _ in range(device.count)]
        device = self._random.choice(devices)
        self._engine.clock.after(self._scenario.churn.measure_s * 1e3, lambda: self._join(device))

    def _join(self, device: DeviceSpec) -> None:
        """It publishes that it joins, and chooses layers once it has read which others join now."""
        if not self._joining:
            self._engine.clock.after(self._scenario.serving.refresh_ms, self._place)
        self._joining.append(self._make(device))

    def _place(self) -> None:
        joining, self._joining = self._joining, []
        spans = self._engine.policy.join(self._engine.observe())
        for node in joining:
            span = spans.get(node.id)
            self.joined += 1
            self._engine.notify("join", n=node.id, span=str(span))
            if span is not None:
                node.take_layers(span, NodeState.LOADING)
                self._engine.clock.after(self._load_ms(len(span)), lambda n=node, s=span: self._serve(n, s))  # type: ignore[misc]

    def _load_ms(self, layers: int) -> float:
        return layers * self._scenario.model.layer_bytes / 1e6 / self._scenario.churn.load_mb_per_s * 1e3

    def _serve(self, node: SimNode, span: LayerSpan) -> None:
        if node.alive:
            node.take_layers(span, NodeState.SERVING)
            self._engine.notify("serve", n=node.id, span=str(span))
            self._count(node)
            self._engine.published()
            self._engine.chains.wake()

    # Rebalancing -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Every `rebalance_s`: the first moves of a new allocation, if two checks in a row had one and none is on."""
        engine, churn = self._engine, self._scenario.churn
        over = engine.clock.now > churn.periods * churn.period_s * 1e3 and not engine.open_requests
        if over:
            return
        engine.clock.after(churn.rebalance_s * 1e3, self._check)
        if self._moving:
            return
        try:
            plan = engine.policy.rebalance(engine.observe())
        except Infeasible:
            plan = None
        self._checks_failed = self._checks_failed + 1 if plan is not None and plan.waves else 0
        if plan is not None and plan.waves and self._checks_failed > 1:
            self._checks_failed = 0
            for move in plan.waves[0]:
                self._move(move)

    def _move(self, move: SpanMove) -> None:
        engine = self._engine
        node = engine.nodes[move.peer]
        if not node.alive or node.state is NodeState.LOADING:
            return
        self.moved += 1
        self._moving += 1
        engine.notify("move", n=move.peer, old=str(move.old), new=str(move.new))
        if not move.overlap:
            self._drop_sessions(node)
            node.take_layers(move.new, NodeState.LOADING)
            self._count(node)
        engine.clock.after(self._load_ms(layers_to_load(move.old, move.new)), lambda: self._moved(node, move.new))

    def _moved(self, node: SimNode, span: LayerSpan) -> None:
        self._moving -= 1
        if node.alive:
            self._drop_sessions(node)
            self._serve(node, span)

    def _drop_sessions(self, node: SimNode) -> None:
        """A node that moves closes its sessions; their clients are notified at once."""
        for held in list(node.held.values()):
            node.close(held.session)
            self._engine.chains.lost(held.session, node.id)

    # Coverage --------------------------------------------------------------------------------------------------------

    def _count(self, node: SimNode) -> None:
        """`node` has changed: update the replica counts, and how long some layer has no node."""
        self._recount(node)
        now = self._engine.clock.now
        if not all(self._replicas):
            if self._gap_since is None:
                self._gap_since = now
                self._engine.notify("gap")
        elif self._gap_since is not None:
            self.gaps.append((self._gap_since, now))
            self._gap_since = None
            self._engine.notify("covered")

    def _recount(self, node: SimNode) -> None:
        for layer in self._served.pop(node.id, ()):
            self._replicas[layer] -= 1
        if node.alive and node.span is not None and node.state is NodeState.SERVING:
            self._served[node.id] = node.span
            for layer in node.span:
                self._replicas[layer] += 1

    def close(self) -> None:
        """End a gap that is still open."""
        if self._gap_since is not None:
            self.gaps.append((self._gap_since, self._engine.clock.now))
            self._gap_since = None
