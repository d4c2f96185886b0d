"""How far this node has come with its layers.

Whether a session is taken has one owner for each reason:
- `owner.availability.Availability`: why the owner's machine is not lent now (input; changes nothing by itself);
- `serving.session_server.SessionServer.refuse`: the whole node takes no new session (set by `swarm_node.node` alone);
- `serving.served_spans.ServedSpan.open`: one loaded span takes none, because the node moves away from it.
`Lifecycle.state` is what the node's record shows of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.types import ExpertShare, LayerSpan, NodeState


@dataclass(slots=True)
class Lifecycle:
    """`phase`: progress with the layers. `leaving`: other nodes should take them over. `share`: of the experts of
    `span`, or, without a span, those that are held for nodes that lead their layers; None: a span is held whole."""

    phase: NodeState = NodeState.JOINING
    span: LayerSpan | None = None
    share: ExpertShare | None = None
    kv_tokens: int = 0
    leaving: bool = False

    def state(self, refusing: bool) -> NodeState:
        """The state to publish. `refusing`: new sessions are refused, whatever the phase."""
        if refusing and self.phase is NodeState.SERVING:
            return NodeState.DRAINING
        if self.leaving and self.phase is NodeState.SERVING:
            return NodeState.LEAVING
        return self.phase
