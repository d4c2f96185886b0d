"""Water-filling inside one pipeline: layers in proportion to compute, as far as memory allows (Parallax §3.2).

Owns the integer shares of the nodes of one replica. Knows neither how nodes are grouped into replicas (`allocation`)
nor what the links between them cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import Infeasible, UsageError
from swarm.quantities import LayerCapacity, NodeId, Region, Schema, Speed
from swarm.types import Hop


class PoolNode(Schema, frozen=True):
    """A node that can be given layers. `compute` in any unit of speed shared by all nodes; `region` "" if unknown.

    `layer_capacity`: layers its memory holds, KV cache, embedding and head already set aside. Raises UsageError.
    """

    id: NodeId
    layer_capacity: LayerCapacity
    compute: Speed
    region: Region = ""

    def __post_init__(self) -> None:
        if self.layer_capacity < 0:
            raise UsageError(f"node {self.id} has a layer_capacity of {self.layer_capacity}; it cannot be negative")
        if not (math.isfinite(self.compute) and self.compute > 0):
            raise UsageError(f"node {self.id} has a compute of {self.compute}; it must be a positive number")


@dataclass(frozen=True, slots=True)
class Balance:
    """`spans` cover `[0, num_layers)` in pipeline order; `scale` is the paper's λ, layers per unit of compute.

    A node whose share rounds to no layer at all is left out of `spans`: a hop without work only costs time.
    """

    spans: tuple[Hop, ...]
    scale: float


def balance(num_layers: int, nodes: Sequence[PoolNode]) -> Balance:
    """Share `num_layers` among `nodes`, given in pipeline order: x_i = min(c_i, λ F_i), and the x_i sum to the layers.

    Whole shares come from the largest remainder (Hamilton); a remainder only arises below a node's capacity, so
    rounding up never exceeds it. Ties go to the lower node id. Raises Infeasible if the nodes hold too few layers.
    """
    check_pool(num_layers, nodes)
    held = sum(node.layer_capacity for node in nodes)
    if held < num_layers:
        raise Infeasible(
            f"the pipeline holds {held} of {num_layers} layers; {num_layers - held} layers of memory are missing"
        )
    shares, scale = fill(num_layers, nodes)
    return Balance(lay_out(nodes, shares), scale)


def lay_out(nodes: Sequence[PoolNode], shares: Sequence[int]) -> tuple[Hop, ...]:
    """Consecutive spans of `shares[i]` layers; a node without a share gets no hop."""
    hops, cursor = [], 0
    for node, share in zip(nodes, shares, strict=True):
        if share:
            hops.append(Hop(node.id, cursor, cursor + share))
            cursor += share
    return tuple(hops)


def check_pool(num_layers: int, nodes: Sequence[PoolNode]) -> None:
    """Raises UsageError if there is no layer to place or an id occurs twice."""
    if num_layers < 1:
        raise UsageError(f"num_layers is {num_layers}; a model has at least one layer")
    if len({node.id for node in nodes}) != len(nodes):
        raise UsageError("two nodes have the same id; ids must be unique")


def fill(num_layers: int, nodes: Sequence[PoolNode]) -> tuple[list[int], float]:
    """-> (layers of each node, λ), exactly: the speeds are scaled to whole numbers first. The nodes must hold them all.

    Instead of bisecting for λ, raise it from full node to full node: at the λ that would share what is left among the
    open nodes, every node it overfills is full in the answer too, because λ only grows as nodes fill up.
    """
    ratios = [node.compute.as_integer_ratio() for node in nodes]
    unit = max(denominator for _, denominator in ratios)
    speeds = [numerator * (unit // denominator) for numerator, denominator in ratios]
    shares = [node.layer_capacity for node in nodes]
    left, still_open = num_layers, list(range(len(nodes)))
    while still_open:
        speed = sum([speeds[i] for i in still_open])
        below = [i for i in still_open if shares[i] * speed > left * speeds[i]]
        if len(below) == len(still_open):
            _largest_remainder(left, still_open, speeds, shares, nodes)
            return shares, _ratio(left * unit, speed)
        left -= sum([shares[i] for i in still_open]) - sum([shares[i] for i in below])
        still_open = below
    return shares, max(node.layer_capacity / node.compute for node in nodes)


def _largest_remainder(
    layers: int, members: Sequence[int], speeds: Sequence[int], shares: list[int], nodes: Sequence[PoolNode]
) -> None:
    """Write the shares of `members`: the whole part of `layers * speed / sum(speed)`, then one more by remainder."""
    total = sum([speeds[i] for i in members])
    remainder = {}
    for i in members:
        shares[i], remainder[i] = divmod(layers * speeds[i], total)
    order = sorted(members, key=lambda i: (-remainder[i], nodes[i].id))
    for i in order[: layers - sum([shares[i] for i in members])]:
        shares[i] += 1


def _ratio(numerator: int, denominator: int) -> float:
    try:
        return numerator / denominator
    except OverflowError:  # a node some 300 orders of magnitude slower than one unit of compute
        return math.inf
