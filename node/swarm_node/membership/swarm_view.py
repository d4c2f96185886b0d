"""The swarm around this node, by the records it has: who is compatible, what the others cover without us.

Reads only; decides and changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from swarm.errors import Infeasible
from swarm.planner.rebalancing.target import target_allocation
from swarm.types import LayerSpan, NodeProfile, Snapshot, coverage
from swarm_node.membership.placement import compatible


@dataclass(frozen=True, slots=True)
class SwarmView:
    """`snapshot()`: the nodes that serve our model now; raises NetworkError. `profile()`: this node as it is now."""

    snapshot: Callable[[], Awaitable[Snapshot]]
    profile: Callable[[], NodeProfile]

    async def compatible_snapshot(self) -> Snapshot:
        """The nodes that could be in one chain with this one, and this one as it is now. Raises NetworkError."""
        return compatible(await self.snapshot(), self.profile())

    async def coverage_by_others(self) -> Callable[[LayerSpan], bool]:
        """-> whether other nodes serve all these layers and are not about to leave. Raises NetworkError."""
        own = self.profile().peer
        snapshot = await self.compatible_snapshot()
        serving = snapshot.serving()
        others = (node.span for node in serving if node.span is not None and node.peer != own and not node.departing)
        covered = coverage(others, snapshot.num_layers)
        return lambda span: all(covered[layer] for layer in span)

    async def replaceable(self) -> bool:
        """Whether the others could hold the whole model without us. Raises NetworkError."""
        own, snapshot = self.profile().peer, await self.compatible_snapshot()
        others = tuple(node for node in snapshot.nodes if node.peer != own)
        try:
            target_allocation(replace(snapshot, nodes=others))
        except Infeasible:
            return False
        return True
