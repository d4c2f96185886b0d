"""Round-robin: pipelines of equal stages over nodes in the order they come, and requests assigned to them in turn."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import Infeasible
from swarm.simulator.model.node import SimNode
from swarm.simulator.policies.pipelines import StaticPipelines, equal_shares, lay_out
from swarm.simulator.policy import alive
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Hop


class RoundRobin(StaticPipelines):
    """Takes nodes until an equal split fits into each of them, then starts the next pipeline."""

    def form(self, view: StaleSnapshot) -> Sequence[Sequence[Hop]]:
        pipelines: list[list[Hop]] = []
        group: list[SimNode] = []
        for node in alive(view):
            if node.capacity < 1:
                continue
            group.append(node)
            shares = equal_shares(view.num_layers, len(group))
            if shares[0] <= min(n.capacity for n in group):
                pipelines.append(lay_out(group, shares))
                group = []
        if not pipelines:
            raise Infeasible("no number of nodes holds an equal split of the model")
        return pipelines
