"""When a swarm that has become uneven is allocated again: thresholds, timeouts and hysteresis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """Shorter timeouts react sooner to a loss, and move weights more often for what would have passed by itself."""

    alpha: float = 0.5  # weight of KV memory against compute in a layer's load; the paper's default
    threshold: float = 0.5  # coefficient of variation that triggers; two replicas of one half, one of the other: 0.33
    coverage_timeout_s: float = 6.0  # how long a layer must have no node; doubled by each recent move of this node
    imbalance_timeout_s: float = 30.0  # how long loads must differ, or a gap last that joining nodes should fill
    stability_s: float = 2.0  # how long a move must stay in the first wave; longer than a record takes to spread
    cooldown_s: float = 300.0  # after a move this node makes no other for balance
    min_gain: float = 0.2  # relative fall of the coefficient of variation that is worth a move
    max_permuted_nodes: int = 6  # of a replica whose orders are all tried for the fewest layers to load; n! of them


POLICY = RebalancePolicy()
