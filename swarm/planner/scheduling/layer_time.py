"""What a layer costs at a node now (τ): its cost curve, corrected by what live batches take.

Owns the correction. Knows no clocks: times come with the calls. What τ is for is routing's; who publishes it, the
node's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.ewma import Ewma
from swarm.planner.scheduling.batch_scheduler import Schedulable
from swarm.planner.scheduling.policy import DEFAULT_POLICY, SchedulingPolicy
from swarm.types import CostCurve, LayerSpan


@dataclass(frozen=True, slots=True)
class BatchStats:
    """One batch as it was measured."""

    span: LayerSpan
    steps: int
    decode_steps: int
    rows: int
    compute_ms: float

    @classmethod
    def of(cls, batch: Sequence[Schedulable], compute_ms: float) -> BatchStats:
        """`batch` has at least one step."""
        decode_steps = rows = 0
        for step in batch:
            decode_steps += not step.prefill
            rows += step.rows
        return cls(batch[0].span, len(batch), decode_steps, rows, compute_ms)


class LayerTimeEstimator:
    """τ as the cost curve expects it for one session more than are open, times how far live batches are off the curve.

    Expected rather than measured, so that a chain that is selected or released shows at once (Parallax §3.3); in the
    simulator that serves more tokens, sooner, than the average of recent steps (docs/benchmarks/simulator.md). Prefill that waits
    is left out: it delays a session once, and τ is paid for every token.
    """

    def __init__(self, cost: CostCurve, policy: SchedulingPolicy = DEFAULT_POLICY) -> None:
        """`cost`: the calibration's, for an idle machine."""
        self._cost = cost
        self._policy = policy
        self._recent = Ewma(policy.layer_time_decay, 1.0)  # measured over expected
        self._long_term = Ewma(policy.long_term_decay, 1.0)
        self._observed_s = 0.0

    def observe(self, stats: BatchStats, now_s: float) -> None:
        """Learn from a batch that only decoded; what prefill costs says little of a token."""
        if stats.decode_steps < stats.steps or not stats.steps:
            return
        ratio = stats.compute_ms / len(stats.span) / self._cost.ms_at(stats.rows)
        ratio = min(self._policy.max_ratio, max(1 / self._policy.max_ratio, ratio))
        self._recent.value = self._ratio(now_s)
        self._recent.update(ratio)
        self._long_term.update(ratio)
        self._observed_s = now_s

    def ms(self, sessions: int, now_s: float) -> float:
        """ms a layer takes for a token of a session that joins `sessions` others."""
        return self._ratio(now_s) * self._cost.ms_at(sessions + 1)

    def _ratio(self, now_s: float) -> float:
        """What recent batches say; without any, it fades to what is usual here."""
        usual = self._long_term.value
        fade = math.exp((self._observed_s - now_s) / self._policy.idle_fade_s)
        return usual + (self._recent.value - usual) * fade
