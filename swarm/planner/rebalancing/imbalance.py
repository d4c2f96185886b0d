"""Parallax §3.4 (iii): whether the whole swarm should be reallocated.

Owns the load of a layer and the two triggers (coverage, coefficient of variation). Knows neither how long a trigger has
lasted (`rebalancer`) nor the target allocation (`target`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import UsageError
from swarm.planner.rebalancing.policy import POLICY
from swarm.quantities import Amount, Schema
from swarm.types import LayerSpan, NodeProfile, PeerId, missing_ranges


class LayerLoad(Schema, frozen=True):
    """KV memory and compute that all nodes together provide for one layer, in any units that the totals share."""

    kv: Amount
    compute: Amount


@dataclass(frozen=True, slots=True)
class ImbalanceVerdict:
    """`cv`: coefficient of variation of the layers' loads. `reason`: begins with coverage, imbalance or balanced."""

    cv: float
    rebalance: bool
    reason: str

    @property
    def gap(self) -> bool:
        return self.reason.startswith("coverage")


def load_imbalance(
    layers: Sequence[LayerLoad],
    total_kv: float,
    total_compute: float,
    alpha: float = POLICY.alpha,
    threshold: float = POLICY.threshold,
) -> ImbalanceVerdict:
    """Whether the model should be reallocated: a layer is served by no node, or the loads differ too much.

    load = alpha kv / total_kv + (1 - alpha) compute / total_compute, 0 for a total of 0 (the paper's footnote 2); cv is
    their standard deviation over their mean, 0 if all are 0. Raises UsageError.
    """
    if not layers:
        raise UsageError("there are no layers to judge")
    numbers = [total_kv, total_compute, threshold, *(x for load in layers for x in (load.kv, load.compute))]
    if not (0 <= alpha <= 1) or not all(math.isfinite(x) and x >= 0 for x in numbers):
        raise UsageError("alpha must lie between 0 and 1, and loads, totals and threshold must be numbers from 0 up")
    cv = variation([_load(layer, total_kv, total_compute, alpha) for layer in layers])
    missing = missing_ranges(1 if layer.kv > 0 or layer.compute > 0 else 0 for layer in layers)
    if missing:
        ranges = ", ".join(f"{a}:{b}" for a, b in missing)
        return ImbalanceVerdict(cv, True, f"coverage: nobody serves layers {ranges}")
    if cv > threshold:
        return ImbalanceVerdict(cv, True, f"imbalance: the layers' loads vary by {cv:.2f}, more than {threshold:.2f}")
    return ImbalanceVerdict(cv, False, f"balanced: the layers' loads vary by {cv:.2f}, no more than {threshold:.2f}")


def _load(layer: LayerLoad, total_kv: float, total_compute: float, alpha: float) -> float:
    memory = layer.kv / total_kv if total_kv else 0.0
    compute = layer.compute / total_compute if total_compute else 0.0
    return alpha * memory + (1.0 - alpha) * compute


def variation(loads: Sequence[float]) -> float:
    """Population standard deviation over mean; 0 if the mean is 0."""
    mean = math.fsum(loads) / len(loads)
    if mean == 0.0:
        return 0.0
    return math.sqrt(math.fsum((x - mean) ** 2 for x in loads) / len(loads)) / mean


def judge_spans(
    nodes: Mapping[PeerId, NodeProfile],
    spans: Mapping[PeerId, LayerSpan],
    num_layers: int,
    alpha: float = POLICY.alpha,
    threshold: float = POLICY.threshold,
) -> ImbalanceVerdict:
    """`load_imbalance` of `nodes` if they served `spans`.

    Departure from the paper: a node's compute is split among the layers it serves, instead of counting in full for
    each; otherwise a node with one layer would add no more to it than a node with all of them. So is its memory: the KV
    tokens of a layer are those it offers now, times the layers it has now, over the layers it would have.
    """
    kv, compute = [0.0] * num_layers, [0.0] * num_layers
    for peer, span in spans.items():
        node = nodes[peer]
        tokens = max(node.kv_capacity_tokens, 1) * (len(node.span) if node.span else len(span))
        for layer in range(span.start, min(span.end, num_layers)):
            kv[layer] += tokens / len(span)
            compute[layer] += speed(node) / len(span)
    layers = [LayerLoad(k, c) for k, c in zip(kv, compute, strict=True)]
    return load_imbalance(layers, math.fsum(kv), math.fsum(compute), alpha, threshold)


def speed(node: NodeProfile) -> float:
    """Layers a second, by its calibration (not by its queue), to two digits, so that noise changes no plan."""
    return float(f"{1000.0 / min(max(node.cost.ms_at(1), 1e-3), 1e6):.1e}")
