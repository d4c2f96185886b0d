"""Which of several replicas finishes a request first (Hyperion's HypSched-RT, §IV-B, Algorithm 2).

One pass over the nodes' states. Owns the rule; knows neither how states were gathered nor how old they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from swarm.errors import Infeasible, UsageError
from swarm.quantities import Amount, NodeId, Schema, Speed


class NodeLoad(Schema, frozen=True):
    """The current load of one replica.

    `running_remaining` and `queued` are work in the request's unit (FLOPs), `capacity` is that unit a second,
    `available_memory` is in the unit of the request's memory.
    """

    id: NodeId
    capacity: Speed
    available_memory: Amount
    running_remaining: Amount = 0.0
    queued: Annotated[Sequence[Amount], Meta(max_length=1 << 16)] = ()
    available: bool = True

    def completion_ms(self, work: float) -> float:
        """When `work` would be done if it came last in the queue now (eqs. 19 and 20), ms from now."""
        return math.fsum((self.running_remaining, *self.queued, work)) / self.capacity * 1000


@dataclass(frozen=True, slots=True)
class Dispatch:
    node: str
    completion_ms: float


def dispatch(work: float, memory: float, nodes: Iterable[NodeLoad]) -> Dispatch:
    """The available node with room for `memory` that completes `work` first; on ties the lower id.

    Raises Infeasible, saying whether availability or memory rules the nodes out, and UsageError for numbers that cannot
    be right.
    """
    known = list(nodes)
    _check(work, memory, known)
    ready = [node for node in known if node.available]
    eligible = [node for node in ready if node.available_memory >= memory]
    if not eligible:
        raise Infeasible(_why_none(memory, known, ready))
    completion_ms, node_id = min((node.completion_ms(work), node.id) for node in eligible)
    return Dispatch(node_id, completion_ms)


def _check(work: float, memory: float, nodes: list[NodeLoad]) -> None:
    numbers = [work, memory]
    for node in nodes:
        if not 0 < node.capacity < math.inf:
            raise UsageError(f"node {node.id} needs a capacity above 0")
        numbers += (node.available_memory, node.running_remaining, *node.queued)
    if not all(0 <= x < math.inf for x in numbers):
        raise UsageError("work and memory must be finite and not negative")


def _why_none(memory: float, nodes: list[NodeLoad], ready: list[NodeLoad]) -> str:
    if not nodes:
        return "there is no node to send the request to"
    if not ready:
        return f"none of the {len(nodes)} nodes is available"
    most = max(ready, key=lambda node: node.available_memory)
    return (
        f"the request needs {memory:g} of memory and the most an available node has is {most.available_memory:g}"
        f" (node {most.id})"
    )
