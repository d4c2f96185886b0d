"""EdgeShard (Zhang et al., 2024): which devices to use and how to split the model among them.

Two programs, as in the paper: the least latency of one token, devices that only slow it down left out, and the least
bottleneck over all devices. The first shard is on the device that got the request. Prompts are not cut, and tokens are
decoded one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from swarm.errors import Infeasible
from swarm.planner.pipeline.partition import Device, partition
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimSession
from swarm.simulator.policies.hyperion import weights
from swarm.simulator.policies.pipelines import StaticPipelines, lay_out
from swarm.simulator.policy import alive
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Hop


class EdgeShard(StaticPipelines):
    """One pipeline for all requests."""

    def form(self, view: StaleSnapshot) -> Sequence[Sequence[Hop]]:
        devices = [node for node in alive(view) if node.capacity > 0]
        if self.spec.objective == "throughput":
            return [self._balanced(devices, view)]
        source, others = devices[0], devices[1:]
        best: tuple[float, list[Hop]] | None = None
        for count in range(len(others) + 1):
            for chosen in itertools.combinations(others, count):
                hops = self._shortest([source, *chosen], view)
                if hops is None:
                    continue
                ms = self._token_ms(hops, view)
                if best is None or ms < best[0]:
                    best = ms, hops
        if best is None:
            raise Infeasible("the devices together do not hold the model")
        return [best[1]]

    def _shortest(self, devices: Sequence[SimNode], view: StaleSnapshot) -> list[Hop] | None:
        """All of `devices` in this order: a layer each, the rest to the fastest as far as memory goes."""
        counts = [1] * len(devices)
        left = view.num_layers - len(devices)
        for i in sorted(range(len(devices)), key=lambda i: (devices[i].cost.curve.ms_at(1), i)):
            more = min(left, devices[i].capacity - 1)
            counts[i] += more
            left -= more
        return lay_out(devices, counts) if left == 0 else None

    def _token_ms(self, hops: Sequence[Hop], view: StaleSnapshot) -> float:
        compute = math.fsum(view.nodes[hop.peer].cost.span_ms(hop.start, hop.end) for hop in hops)
        row_ms = self.scenario.model.row_bytes / (self.network.spec.bandwidth_mbps * 1e6 / 8 / 1e3)
        links = math.fsum(self.network.latency(a.peer, b.peer) + row_ms for a, b in itertools.pairwise(hops))
        return compute + links

    def _balanced(self, devices: Sequence[SimNode], view: StaleSnapshot) -> list[Hop]:
        found = partition(
            weights(view),
            [Device(n.cost.memory_bytes, layer_ms=(n.cost.curve.ms_at(1),) * view.num_layers) for n in devices],
            allow_idle=True,
        )
        return lay_out(devices, [len(span) if span else 0 for span in found.spans])

    def chunks(self, session: SimSession, view: StaleSnapshot) -> tuple[int, ...]:
        return (session.prompt,)
