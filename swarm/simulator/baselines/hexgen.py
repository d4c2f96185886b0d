"""HexGen (Jiang et al., ICML 2024): the best static partition of the pool into pipelines of unequal stages.

HexGen groups GPUs by a genetic search and lays out each group by dynamic programming. Pools small enough for all
groupings to be tried get the best of them, which no search can beat. Its tensor parallelism is left out: between
machines milliseconds apart, two all-reduces a layer cost more than any stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from swarm.errors import Infeasible, UnsupportedRequest
from swarm.planner.pipeline.partition import Device, LayerCost, partition
from swarm.simulator.model.node import SimNode
from swarm.simulator.policies.pipelines import StaticPipelines, bottleneck_ms, lay_out, pipeline_ms
from swarm.simulator.policy import alive
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Hop

MAX_NODES = 12  # more groupings than can be tried

Kinds = tuple[int, ...]
"""How many nodes of each kind."""


class HexGen(StaticPipelines):
    """The grouping with the most tokens per second, by `objective`.

    "throughput": with every stage always busy, a pipeline yields a token per time of its slowest stage. "latency": with
    one request in each pipeline, a token per time of all stages and links.
    """

    def form(self, view: StaleSnapshot) -> Sequence[Sequence[Hop]]:
        nodes = [node for node in alive(view) if node.capacity > 0]
        if len(nodes) > MAX_NODES:
            raise UnsupportedRequest(f"HexGen's best partition is searched exhaustively, for at most {MAX_NODES} nodes")
        kinds = sorted({node.cost.device.name for node in nodes})
        members = [[node for node in nodes if node.cost.device.name == kind] for kind in kinds]
        layouts: dict[Kinds, tuple[int, ...] | None] = {}
        best: tuple[tuple[float, float], list[Kinds]] | None = None
        for grouping in _groupings(tuple(map(len, members))):
            formed = [g for g in grouping if self._shares(g, members, layouts)]
            if not formed:
                continue
            pipelines = self._assign_nodes(formed, members, layouts)
            latencies = [self._token_ms(view, pipeline) for pipeline in pipelines]
            bottlenecks = [bottleneck_ms(view.nodes, pipeline) for pipeline in pipelines]
            rate = sum(1.0 / ms for ms in (latencies if self.spec.objective == "latency" else bottlenecks))
            latency = sum(latencies) / len(latencies)
            key = (-round(rate, 12), round(latency, 9))
            if best is None or key < best[0]:
                best = key, formed
        if best is None:
            raise Infeasible("no group of nodes holds the model")
        return self._assign_nodes(best[1], members, layouts)

    def _token_ms(self, view: StaleSnapshot, pipeline: Sequence[Hop]) -> float:
        links = sum(self.network.latency(a.peer, b.peer) for a, b in itertools.pairwise(pipeline))
        return pipeline_ms(view.nodes, pipeline) + links

    def _shares(
        self, group: Kinds, members: Sequence[Sequence[SimNode]], known: dict[Kinds, tuple[int, ...] | None]
    ) -> tuple[int, ...] | None:
        """Layers of each stage of a group, kind by kind, for the least bottleneck; None: it cannot hold the model."""
        if group not in known:
            stages = [nodes[0] for count, nodes in zip(group, members, strict=True) for _ in range(count)]
            layers = self.scenario.model.layers
            devices = [Device(n.capacity, layer_ms=(n.cost.curve.ms_at(1),) * layers) for n in stages]
            try:
                found = partition([LayerCost(1.0)] * layers, devices, allow_idle=True)
                known[group] = tuple(len(span) if span else 0 for span in found.spans)
            except Infeasible:
                known[group] = None
        return known[group]

    def _assign_nodes(
        self,
        groups: Sequence[Kinds],
        members: Sequence[Sequence[SimNode]],
        layouts: dict[Kinds, tuple[int, ...] | None],
    ) -> list[tuple[Hop, ...]]:
        """The nodes of each group's stages."""
        left = [iter(nodes) for nodes in members]
        pipelines = []
        for group in groups:
            stages = [next(left[kind]) for kind, count in enumerate(group) for _ in range(count)]
            pipelines.append(tuple(lay_out(stages, layouts[group] or ())))
        return pipelines


def _groupings(counts: Kinds, at_most: Kinds | None = None) -> Iterator[list[Kinds]]:
    """All ways to split a multiset of nodes into groups; groups in falling order, so each way comes once."""
    if not any(counts):
        yield []
        return
    for first in _parts(counts):
        if any(first) and (at_most is None or first <= at_most):
            rest = tuple(a - b for a, b in zip(counts, first, strict=True))
            for others in _groupings(rest, first):
                yield [first, *others]


def _parts(counts: Kinds) -> Iterator[Kinds]:
    if not counts:
        yield ()
        return
    for mine in range(counts[0], -1, -1):
        for rest in _parts(counts[1:]):
            yield (mine, *rest)
