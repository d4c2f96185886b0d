"""The time of a layer at a node now (τ): its cost curve, corrected by measured batches.

Owns the correction. Does not know clocks: times come with the calls.
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
    """The measurements of one batch."""

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
    """τ from the cost curve for one session more than are open, times the ratio of measured batches to the curve.

    Expected rather than measured, so that opening or closing a session shows at once (Parallax §3.3); in the simulator
    that serves more tokens, sooner, than the average of recent steps (docs/benchmarks/simulator.md). Queued prefill is
    left out: it delays a session once, and τ counts for every token.
    """

    def __init__(self, cost: CostCurve, policy: SchedulingPolicy = DEFAULT_POLICY) -> None:
        """`cost`: the calibration's, for an idle machine."""
        self._cost = cost
        self._policy = policy
        self._recent = Ewma(policy.layer_time_decay, 1.0)  # measured over expected
        self._long_term = Ewma(policy.long_term_decay, 1.0)
        self._observed_s = 0.0

    def observe(self, stats: BatchStats, now_s: float) -> None:
        """Update by a batch; ignored if it had prefill, whose cost differs from decoding's."""
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
        """Measured over expected time; without recent batches it decays to the long-term ratio."""
        typical = self._long_term.value
        fade = math.exp((self._observed_s - now_s) / self._policy.idle_fade_s)
        return typical + (self._recent.value - typical) * fade
