"""Nodes and links as the input of phase 2, in ms.

Owns `RouteNode` and what a ρ missing from a mapping counts as. Without numpy, so that `swarm-plan` starts quickly;
`graph` makes arrays of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from swarm.errors import UsageError
from swarm.quantities import Amount, Amounts, Edge, NodeId, Schema
from swarm.types import LayerSpan

Objective = Literal["latency", "bottleneck"]
Links = Callable[[str, str], float] | Mapping[str, Mapping[str, float]]


class RouteNode(Schema, frozen=True):
    """A node as input of phase 2: layers `[start, end)` and τ in ms, queue included.

    `layer_ms`: one number for all layers, or one per layer of the span (or of the model, indexed by layer).
    """

    id: NodeId
    start: Edge
    end: Edge
    layer_ms: Amount | Amounts

    def tau(self, layer: int) -> float:
        """τ of one layer of the span, ms."""
        if isinstance(self.layer_ms, int | float):
            return float(self.layer_ms)
        local = len(self.layer_ms) == self.end - self.start
        return float(self.layer_ms[layer - self.start if local else layer])

    def span(self, num_layers: int) -> LayerSpan:
        """Raises UsageError if it lies outside the model."""
        self._check(num_layers)
        return LayerSpan(self.start, self.end)

    def taus(self, num_layers: int) -> Sequence[float]:
        """τ of the layers of the span, ms. Raises UsageError for a bad span or a list of another length."""
        self._check(num_layers)
        if isinstance(self.layer_ms, int | float):
            return (self.layer_ms,) * (self.end - self.start)
        if len(self.layer_ms) == self.end - self.start:
            return self.layer_ms
        if len(self.layer_ms) == num_layers:
            return self.layer_ms[self.start : self.end]
        raise UsageError(
            f"node {self.id} gives {len(self.layer_ms)} layer times; give one, or one for each of its"
            f" {self.end - self.start} layers"
        )

    def _check(self, num_layers: int) -> None:
        if not 0 <= self.start < self.end <= num_layers:
            raise UsageError(f"node {self.id} serves {self.start}:{self.end}, which is no span of {num_layers} layers")


def row_order(node: RouteNode) -> tuple[int, int, str]:
    """How a `LayerGraph` sorts its rows; stable for nodes that compare equal."""
    return node.start, node.end, node.id


def links(link_ms: Links) -> Callable[[str, str], float]:
    """ρ in ms as a function. A pair that a mapping leaves out is read the other way round, else costs nothing."""
    if not isinstance(link_ms, Mapping):
        return link_ms
    table = link_ms
    return lambda a, b: table.get(a, {}).get(b, table.get(b, {}).get(a, 0.0))
