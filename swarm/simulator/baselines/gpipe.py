"""GPipe (Huang et al., 2019), as Hyperion's evaluation uses it: the same number of layers for every tier.

There a graph neural network assigns the requests to the machines of a tier. Its weights are not published; the rule
that finishes each request first stands in for it, which a learned one can hardly beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from swarm.simulator.model.node import SimNode
from swarm.simulator.policies.hyperion import TieredPolicy, require
from swarm.simulator.policies.pipelines import equal_shares
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import LayerSpan


class GPipe(TieredPolicy):
    """Equal split."""

    def split(self, tiers: Sequence[SimNode], view: StaleSnapshot) -> Sequence[LayerSpan | None]:
        ends = [0, *accumulate(equal_shares(view.num_layers, len(tiers)))]
        spans = [LayerSpan(a, b) for a, b in pairwise(ends)]
        require(tiers, spans, view)
        return spans
