"""Where this node is in its life: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.types import LayerSpan, NodeState


@dataclass(slots=True)
class Lifecycle:
    """`phase`: how far it has come with its layers. `leaving`: others should take them over. `closed`: it takes no new
    sessions, whatever the phase."""

    phase: NodeState = NodeState.JOINING
    span: LayerSpan | None = None
    kv_tokens: int = 0
    leaving: bool = False
    closed: bool = False

    @property
    def state(self) -> NodeState:
        """What others are told."""
        if self.closed and self.phase is NodeState.SERVING:
            return NodeState.DRAINING
        if self.leaving and self.phase is NodeState.SERVING:
            return NodeState.LEAVING
        return self.phase
