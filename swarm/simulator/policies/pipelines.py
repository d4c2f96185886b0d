"""What static pipelines share: fixed chains, and a rule that assigns requests to them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

from swarm.errors import NoRoute
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimSession
from swarm.simulator.policy import ServingPolicy
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Chain, Hop, LayerSpan, PeerId


class StaticPipelines(ServingPolicy):
    """`pipelines` are formed once. A request stays with the one it is assigned to and waits in its queue."""

    @abstractmethod
    def form(self, view: StaleSnapshot) -> Sequence[Sequence[Hop]]:
        """The pipelines. Raises Infeasible."""

    def place(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        self.pipelines = [tuple(pipeline) for pipeline in self.form(view)]
        self._rates = [1.0 / bottleneck_ms(view.nodes, pipeline) for pipeline in self.pipelines]
        self._assigned: Counter[int] = Counter()
        self._open: Counter[int] = Counter()
        self._of: dict[int, int] = {}  # session -> pipeline
        return {hop.peer: hop.span for pipeline in self.pipelines for hop in pipeline}

    def admission_queue(self, session: SimSession) -> str:
        """Assign the request to a pipeline.

        least_loaded: the fewest open requests for its speed; weighted: shares in proportion to speed, whatever is open;
        round_robin: in turn.
        """
        rule = self.spec.dispatch
        load = self._open if rule == "least_loaded" else self._assigned
        speed = [1.0] * len(self.pipelines) if rule == "round_robin" else self._rates
        chosen = min(range(len(self.pipelines)), key=lambda i: ((load[i] + 1) / speed[i], i))
        self._assigned[chosen] += 1
        self._open[chosen] += 1
        self._of[session.number] = chosen
        return str(chosen)

    def choose(self, session: SimSession, view: StaleSnapshot) -> Chain:
        """Its own pipeline, once there is room at every stage. Raises NoRoute."""
        pipeline = self.pipelines[self._of[session.number]]
        for hop in pipeline:
            if not view.nodes[hop.peer].can_open(session, hop):
                raise NoRoute(f"stage {hop.peer} is full")
            if hop.peer in session.banned:
                raise NoRoute(f"stage {hop.peer} is gone")
        return Chain(pipeline)

    def closed(self, session: SimSession) -> None:
        self._open[self._of[session.number]] -= 1


def stage_ms(node: SimNode, start: int, end: int, rows: int = 1) -> float:
    """A decoding step of `rows` sessions at one stage."""
    return node.cost.span_ms(start, end, rows)


def bottleneck_ms(nodes: Mapping[PeerId, SimNode], pipeline: Sequence[Hop]) -> float:
    return max(stage_ms(nodes[hop.peer], hop.start, hop.end) for hop in pipeline)


def pipeline_ms(nodes: Mapping[PeerId, SimNode], pipeline: Sequence[Hop]) -> float:
    """A decoding step through all stages, links left out."""
    return math.fsum(stage_ms(nodes[hop.peer], hop.start, hop.end) for hop in pipeline)


def equal_shares(layers: int, stages: int) -> list[int]:
    """GPipe's: as equal as can be, the larger ones first."""
    return [layers // stages + (i < layers % stages) for i in range(stages)]


def lay_out(nodes: Sequence[SimNode], shares: Sequence[int]) -> list[Hop]:
    """Consecutive hops of `shares[i]` layers; a node without a share gets none."""
    hops, start = [], 0
    for node, share in zip(nodes, shares, strict=True):
        if share:
            hops.append(Hop(node.id, start, start + share))
            start += share
    return hops
