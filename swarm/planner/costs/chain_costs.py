"""The cost of a step along a chain: compute time of its hops by the width of the step, and time of the links.

Owns the sums. Does not know how the costs were measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.errors import UsageError
from swarm.planner.costs.policy import POLICY
from swarm.planner.pipeline.prefill_chunking import ChunkCost
from swarm.quantities import Amount, Layers, Schema
from swarm.types import Chain, CostCurve, PeerId, Snapshot

ROUNDING_MS = 1e-9  # times below it are rounding errors


class Stage(Schema, frozen=True):
    """One hop. `layer_ms`: τ of one of its `layers`, queue included; `cost`: a layer's time by width."""

    layers: Layers
    layer_ms: Amount
    cost: CostCurve

    def ms(self, width: float) -> float:
        """ms of a step of `width` rows: the compute time grows with the width, the queue does not."""
        return self.layers * max(0.0, self.layer_ms + self.cost.ms_at(width) - self.cost.ms_at(1))

    def chunk_cost(self) -> ChunkCost:
        """A line fitted to the curve's wide points by relative least squares: a single point may be noise."""
        widths = [width for width in self.cost.widths if width >= POLICY.min_chunk_rows]
        if len(widths) < 2:
            widths = list(self.cost.widths[-2:]) if len(self.cost.widths) > 1 else [1, 2]
        points = [(width, ms, ms**-2) for width in widths if (ms := self.ms(width)) > 0]
        weight = math.fsum(w for _, _, w in points)
        if not weight:
            return ChunkCost(0.0, 0.0, 0.0)
        mean = math.fsum(w * x for x, _, w in points) / weight
        mean_ms = math.fsum(w * y for _, y, w in points) / weight
        spread = math.fsum(w * (x - mean) ** 2 for x, _, w in points)
        rise = math.fsum(w * (x - mean) * (y - mean_ms) for x, y, w in points)
        per_token = clamp_noise(rise / spread) if spread else mean_ms / mean
        base = clamp_noise(mean_ms - per_token * mean)
        return ChunkCost(base, per_token, 0.0) if base else ChunkCost(0.0, clamp_noise(mean_ms / mean), 0.0)


def clamp_noise(ms: float) -> float:
    """0 for a rounding error, or for a node that claims to take no time."""
    return ms if ms > ROUNDING_MS else 0.0


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """The costs of a chain. `link_ms`: one way, client -> first hop, between hops, tail -> client, `[hops + 1]`.

    `row_ms`: what one more row adds to a link between hops (its hidden state over the bandwidth).
    """

    stages: tuple[Stage, ...]
    link_ms: tuple[float, ...]
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages or len(self.link_ms) != len(self.stages) + 1:
            hops, links = len(self.stages), len(self.link_ms)
            raise UsageError(f"a chain needs at least one hop, and one link more than hops; not {hops} and {links}")
        numbers = [*self.link_ms, self.row_ms, *(s.layer_ms for s in self.stages)]
        if not all(0 <= x < math.inf for x in numbers) or any(s.layers < 1 for s in self.stages):
            raise UsageError("a chain's times must be finite and not negative, and each hop needs a layer")
        if self.iteration_ms(1) <= 0:
            raise UsageError(
                "a chain whose round trip takes no time cannot be planned for; give its layer or link times"
            )

    @classmethod
    def of(
        cls, chain: Chain, snapshot: Snapshot, link_ms: Callable[[PeerId, PeerId], float], client: PeerId = ""
    ) -> ChainCosts:
        """From the snapshot: each hop's mean τ over its layers and its cost curve; ρ by `link_ms(from, to)`."""
        stages = []
        for hop in chain.hops:
            node = snapshot.node(hop.peer)
            if node is None:
                raise UsageError(f"the snapshot has no node {hop.peer}, which is in the chain")
            times = node.layer_ms[hop.start - node.span.start : hop.end - node.span.start] if node.span else ()
            stages.append(
                Stage(hop.end - hop.start, math.fsum(times) / len(times) if times else node.cost.ms_at(1), node.cost)
            )
        ends = (client, *chain.peers, client)
        return cls(tuple(stages), tuple(link_ms(a, b) for a, b in pairwise(ends)))

    def compute_ms(self, width: float) -> float:
        return math.fsum(stage.ms(width) for stage in self.stages)

    def links_ms(self, width: float) -> float:
        return math.fsum(self.link_ms) + self.row_ms * (width - 1) * (len(self.stages) - 1)

    def iteration_ms(self, width: float) -> float:
        """From sending a step of `width` rows to its result."""
        return self.compute_ms(width) + self.links_ms(width)

    def chunk_cost(self) -> ChunkCost:
        """The cost of a prefill chunk at the slowest hop, as one line."""
        return max((stage.chunk_cost() for stage in self.stages), key=lambda cost: cost.ms(POLICY.chunk_tokens, 0))

    def prefill_ms(self, chunks: Sequence[int], step_ms: float = 0.0) -> float:
        """From the first chunk's start to the last one's end at the last hop (Jupiter, eq. 4), without the links."""
        each = {length: self.bottleneck_ms(length) + step_ms for length in set(chunks)}
        return math.fsum(each[length] for length in chunks) + (len(self.stages) - 1) * max(each.values())

    def bottleneck_ms(self, width: float) -> float:
        """The least time between steps of `width` rows: that of the slowest hop, or a link's transfer time."""
        between = self.row_ms * width if len(self.stages) > 1 else 0.0
        return max(between, *(stage.ms(width) for stage in self.stages))
