"""Jupiter: one pipeline over all devices, with chunked prefill. Partition and chunks are the planner's.

Its decoding (Medusa drafts, points of an outline in parallel) is set in the scenario's policy table and simulated by
the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.planner.pipeline.partition import Device, partition
from swarm.planner.pipeline.prefill_chunking import ChunkCost, plan_prefill
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.session import SimSession
from swarm.simulator.policies.hyperion import weights
from swarm.simulator.policies.pipelines import StaticPipelines, lay_out
from swarm.simulator.policy import alive
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Hop


class Jupiter(StaticPipelines):
    """Balanced by what a layer takes at the width of a decoding step."""

    def form(self, view: StaleSnapshot) -> Sequence[Sequence[Hop]]:
        devices = [node for node in alive(view) if node.capacity > 0]
        rows = 1 + self.spec.draft_tokens
        times = [node.cost.layer_ms(rows, 0.0, 0.0) for node in devices]
        memory = [node.cost.memory_bytes for node in devices]
        stages = [Device(m, layer_ms=(ms,) * view.num_layers) for m, ms in zip(memory, times, strict=True)]
        found = partition(weights(view), stages, "jupiter", allow_idle=True)
        return [lay_out(devices, [len(span) if span else 0 for span in found.spans])]

    def chunks(self, session: SimSession, view: StaleSnapshot) -> tuple[int, ...]:
        """The cut of least pipelined latency for the slowest stage's cost."""
        pipeline = self.pipelines[0]
        costs = [self._cost(view.nodes[hop.peer], hop) for hop in pipeline]
        slowest = max(costs, key=lambda cost: cost.ms(session.prompt, 0))
        least = self.spec.min_chunk or max(_ridge(view.nodes[hop.peer]) for hop in pipeline)
        return plan_prefill(session.prompt, len(pipeline), min(least, session.prompt), slowest).chunks

    def _cost(self, node: SimNode, hop: Hop) -> ChunkCost:
        """A linear fit through the device's times for one chunk and for a chunk twice as long, and its context's."""
        chunk, layers = _ridge(node), len(hop.span)
        one, two = (node.cost.layer_ms(chunk * k, 0.0, 0.0) for k in (1, 2))
        per_token = (two - one) / chunk
        context = (node.cost.layer_ms(2 * chunk, 0.0, 2e3 * chunk) - two) / (2e3 * chunk)
        base = node.cost.device.step_overhead_ms + layers * max(one - chunk * per_token, 0.0)
        return ChunkCost(base, layers * per_token, layers * max(context, 0.0), within_chunk=0.5)


def _ridge(node: SimNode) -> int:
    """Rows that keep a device busy: the first width that takes twice as long as one row."""
    curve = node.cost.curve
    return next((w for w, ms in zip(curve.widths, curve.ms, strict=True) if ms >= 2.0 * curve.ms[0]), curve.widths[-1])
