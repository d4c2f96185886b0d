"""`--local-layers auto`: how many layers a client takes home where it costs little memory and speed.

Owns the choice. Pure: times and sizes are handed in. Links are not counted: they are not measured yet, and without them
a layer weighs more, so that fewer are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from swarm.types import Snapshot
from swarm_client.home.local_layers import LocalLayers


@dataclass(frozen=True, slots=True)
class HomeSharePolicy:
    """What may be given for fewer layers elsewhere."""

    max_slowdown: float = 0.1  # of a token's time with the embedding and the head alone at home
    max_memory: float = 0.25  # of what is available now


POLICY = HomeSharePolicy()


def swarm_layer_ms(snapshot: Snapshot) -> list[float]:
    """The usual time of each layer at the nodes that serve it, ms, by their records; 0 where nobody does."""
    times: list[list[float]] = [[] for _ in range(snapshot.num_layers)]
    for node in snapshot.serving():
        assert node.span is not None  # it serves
        known = node.layer_ms if len(node.layer_ms) == len(node.span) else [node.cost.ms_at(1)] * len(node.span)
        for layer, ms in zip(node.span, known, strict=True):
            if layer < len(times):
                times[layer].append(ms)
    return [median(of) if of else 0.0 for of in times]


def choose_share(
    swarm_ms: Sequence[float],
    home_ms: float,
    layer_bytes: int,
    available_bytes: int,
    at_least: int = 0,
    policy: HomeSharePolicy = POLICY,
) -> LocalLayers:
    """`swarm_ms [layers]`: of each layer elsewhere; `home_ms`, `layer_bytes`: of a layer here. `at_least`: layers at
    each end. Layers are taken in turn, the first ones first: what states give away shrinks with those before them."""
    num_layers = len(swarm_ms)
    budget_ms = policy.max_slowdown * sum(swarm_ms)
    room = int(policy.max_memory * available_bytes)
    chosen = LocalLayers(at_least, at_least, num_layers)
    while True:
        first = chosen.first <= chosen.last
        more = LocalLayers(chosen.first + first, chosen.last + (not first), num_layers)
        own = [*swarm_ms[: more.first], *swarm_ms[num_layers - more.last :]]
        slower_ms = len(own) * home_ms - sum(own)
        if len(own) >= num_layers or len(own) * layer_bytes > room or slower_ms > budget_ms:
            return chosen
        chosen = more
