"""HEFT (Topcuoglu et al., 2002), as Hyperion's evaluation uses it: a memory-aware greedy partition, then HEFT's rule.

For a chain of tasks the upward ranks fall along the chain, so HEFT takes the requests in order of arrival and gives
each task to the machine that finishes it first: what tiers do anyway. How the greedy partition goes the paper does not
say; `proportional` gives every tier layers until its memory is used to the same share, `fill` fills tier after tier.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import Infeasible
from swarm.simulator.model.node import SimNode
from swarm.simulator.policies.hyperion import TieredPolicy, require, weights
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import LayerSpan


class Heft(TieredPolicy):
    """Memory decides who gets how much; speed does not."""

    def split(self, tiers: Sequence[SimNode], view: StaleSnapshot) -> Sequence[LayerSpan | None]:
        proportional = self.spec.partition == "proportional"
        spans = _proportional(tiers, view) if proportional else _fill(tiers, view)
        require(tiers, spans, view)
        return spans


def _proportional(tiers: Sequence[SimNode], view: StaleSnapshot) -> list[LayerSpan]:
    """Layer after layer to the tier whose memory would be used to the least share; in order, at least one each."""
    counts = [1] * len(tiers)
    for _ in range(view.num_layers - len(tiers)):
        counts[min(range(len(tiers)), key=lambda i: ((counts[i] + 1) / tiers[i].cost.memory_bytes, i))] += 1
    return _consecutive(counts)


def _fill(tiers: Sequence[SimNode], view: StaleSnapshot) -> list[LayerSpan]:
    """The first tier as full as memory allows, then the next; every later tier keeps at least one layer."""
    costs = weights(view)
    counts: list[int] = []
    layer = 0
    for i, node in enumerate(tiers):
        later = len(tiers) - i - 1
        count, room = 0, node.cost.memory_bytes
        while layer < view.num_layers - later and costs[layer].memory <= room:
            room -= costs[layer].memory
            count, layer = count + 1, layer + 1
        counts.append(count)
    if layer < view.num_layers or min(counts) < 1:
        raise Infeasible("the tiers together do not hold the model")
    return _consecutive(counts)


def _consecutive(counts: Sequence[int]) -> list[LayerSpan]:
    spans, start = [], 0
    for count in counts:
        spans.append(LayerSpan(start, start + count))
        start += count
    return spans
