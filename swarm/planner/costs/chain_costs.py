"""What a step along a chain costs: its hops' time by the width of the step, and the links' between them.

Owns the sums. Knows neither how the costs were measured nor what is sent along the chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.errors import UsageError
from swarm.planner.pipeline.prefill_chunking import ChunkCost
from swarm.quantities import Amount, Layers, Schema
from swarm.types import Chain, CostCurve, PeerId, Snapshot

NOTHING_MS = 1e-9
CHUNK = 256  # tokens; an ordinary chunk of a prompt
NARROWEST_CHUNK = 8  # from there on a curve is close to a line


class Stage(Schema, frozen=True):
    """One hop. `layer_ms` is τ, queue included, of one of its `layers`; `cost` how a layer's time grows with width."""

    layers: Layers
    layer_ms: Amount
    cost: CostCurve

    def ms(self, width: float) -> float:
        """A step of `width` rows, ms: waiting for others does not grow with our width, computing does."""
        return self.layers * max(0.0, self.layer_ms + self.cost.ms_at(width) - self.cost.ms_at(1))

    def chunk_cost(self) -> ChunkCost:
        """The line through the curve's wide points that is least off, relatively: one of them alone may be noise."""
        widths = [width for width in self.cost.widths if width >= NARROWEST_CHUNK]
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
    """0 for what only rounding has left, or a node that claims to take no time."""
    return ms if ms > NOTHING_MS else 0.0


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """A chain as a step meets it. `link_ms`: one way, client -> first hop, between hops, tail -> client, `[hops + 1]`.

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
            raise UsageError("a chain whose round takes no time cannot be planned for; give its layer or link times")

    @classmethod
    def of(
        cls, chain: Chain, snapshot: Snapshot, link_ms: Callable[[PeerId, PeerId], float], client: PeerId = ""
    ) -> ChainCosts:
        """From the live map: each hop's mean τ over its layers and cost curve, ρ as `link_ms(from, to)` says."""
        stages = []
        for hop in chain.hops:
            node = snapshot.node(hop.peer)
            if node is None:
                raise UsageError(f"the snapshot does not know {hop.peer}, which the chain runs over")
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
        """What a chunk of a prompt costs at the slowest hop, as one line."""
        return max((stage.chunk_cost() for stage in self.stages), key=lambda cost: cost.ms(CHUNK, 0))

    def prefill_ms(self, chunks: Sequence[int], step_ms: float = 0.0) -> float:
        """From the first chunk's start until the last hop has done the last one (Jupiter, eq. 4), links left out."""
        each = {length: self.bottleneck_ms(length) + step_ms for length in set(chunks)}
        return math.fsum(each[length] for length in chunks) + (len(self.stages) - 1) * max(each.values())

    def bottleneck_ms(self, width: float) -> float:
        """How often a step of `width` rows can follow another: the slowest hop, or a link's sending time."""
        between = self.row_ms * width if len(self.stages) > 1 else 0.0
        return max(between, *(stage.ms(width) for stage in self.stages))
