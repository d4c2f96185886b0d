"""Hyperion: contiguous parts of the model on tiers of machines, and a machine of each tier chosen for every request.

Owns what all tiered policies share, and Hyperion itself. Partition and dispatch are the planner's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from swarm.errors import Infeasible
from swarm.planner.pipeline.dispatch import NodeLoad, dispatch
from swarm.planner.pipeline.partition import Device, LayerCost, partition
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimSession
from swarm.simulator.policy import ServingPolicy, alive
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Chain, Hop, LayerSpan, PeerId


class TieredPolicy(ServingPolicy):
    """Every machine of a tier serves the tier's layers; a request goes on tier by tier, as its activations arrive."""

    queues_at_nodes = True

    @abstractmethod
    def split(self, tiers: Sequence[SimNode], view: StaleSnapshot) -> Sequence[LayerSpan | None]:
        """Layers of each tier, given the best machine of each. Raises Infeasible."""

    def place(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        numbers = sorted({node.cost.device.tier for node in alive(view)})
        members = [[n for n in alive(view) if n.cost.device.tier == number] for number in numbers]
        leaders = [max(nodes, key=lambda n: (n.cost.flops_per_s, n.capacity)) for nodes in members]
        spans = self.split(leaders, view)
        self.tiers = [(span, nodes) for span, nodes in zip(spans, members, strict=True) if span is not None]
        for span, nodes in self.tiers:
            for node in nodes:
                node.cost.kv_room(span.start, span.end)
        return {node.id: span for span, nodes in self.tiers for node in nodes}

    def choose(self, session: SimSession, view: StaleSnapshot) -> Chain:
        return Chain((self._pick(session, 0),))

    def extend(self, session: SimSession, view: StaleSnapshot) -> Hop:
        return self._pick(session, len(session.hops))

    def _pick(self, session: SimSession, tier: int) -> Hop:
        """HypSched-RT: the machine of the tier that would finish this request first. Raises Infeasible."""
        span, nodes = self.tiers[tier]
        memory = session.most_tokens * len(span) * self.scenario.model.kv_token_bytes
        loads = [self._load(node, span) for node in nodes if node.alive and node.id not in session.banned]
        return Hop(dispatch(self._work(session, span), memory, loads).node, span.start, span.end)

    def _work(self, session: SimSession, span: LayerSpan) -> float:
        """FLOPs of a whole request at a tier."""
        return session.most_tokens * len(span) * self.scenario.model.row_flops

    def _load(self, node: SimNode, span: LayerSpan) -> NodeLoad:
        rows = len(span) * self.scenario.model.row_flops
        running = [held.session for held in node.held.values()]
        remaining = sum(max(s.most_tokens - s.held, 0) * rows for s in running)
        queued = tuple(self._work(session, span) for session in node.waiting())
        return NodeLoad(node.id, node.cost.flops_per_s, node.kv_room, remaining, queued)


class Hyperion(TieredPolicy):
    """HypSplit-DP on what a decoding step takes on each tier's best machine, then HypSched-RT."""

    def split(self, tiers: Sequence[SimNode], view: StaleSnapshot) -> Sequence[LayerSpan | None]:
        layers = view.num_layers
        devices = []
        for node in tiers:
            idle = node.cost.curve.ms_at(1)
            times = (*(idle for _ in range(layers - 1)), idle + node.cost.head_ms(1))
            devices.append(Device(node.cost.memory_bytes, layer_ms=times))
        return partition(weights(view), devices, "hypsplit").spans


def weights(view: StaleSnapshot) -> list[LayerCost]:
    """Bytes of each layer with its KV reserve; the first includes the embedding, the last the head."""
    model, last = view.scenario.model, view.num_layers - 1
    layer = model.layer_bytes + view.scenario.serving.kv_reserve_tokens * model.kv_token_bytes
    return [LayerCost(layer + model.head_bytes * ((i == 0) + (i == last))) for i in range(last + 1)]


def fits(node: SimNode, span: LayerSpan, view: StaleSnapshot) -> bool:
    """Whether the machine holds the span's weights and the KV room set aside."""
    need = sum(cost.memory for cost in weights(view)[span.start : span.end])
    return need <= node.cost.memory_bytes


def require(nodes: Sequence[SimNode], spans: Sequence[LayerSpan | None], view: StaleSnapshot) -> None:
    """Raises Infeasible for the first machine that cannot hold its span."""
    for node, span in zip(nodes, spans, strict=True):
        if span is not None and not fits(node, span, view):
            raise Infeasible(f"layers {span} do not fit into a {node.cost.device.name}")
