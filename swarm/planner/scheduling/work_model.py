"""What a step costs a device, for sharing it: the time its rows would take alone, by the measured cost curve.

Pure. An estimate: what a batch took is measured, and corrects what its shares are charged
(`BatchScheduler.settle`), so that a step whose cost is misjudged does not gain by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.planner.scheduling.policy import DEFAULT_POLICY, SchedulingPolicy
from swarm.types import UNMEASURED, CostCurve


@dataclass(frozen=True, slots=True)
class WorkModel:
    """`cost`: ms of a layer for so many rows. `context_tokens`: a row that attends to so many tokens costs twice what
    its weights cost (attention is linear in the context, everything else is not)."""

    cost: CostCurve = UNMEASURED
    context_tokens: float = 4096.0

    def layer_ms(self, rows: float, context: float = 0.0) -> float:
        """ms one layer takes for `rows` that attend to `context` tokens each."""
        widest = self.cost.widths[-1]
        row_ms = self.cost.ms[-1] / widest
        return self.cost.ms_at(rows) + row_ms * rows * context / self.context_tokens

    def rows_within(self, ms: float, context: float = 0.0, policy: SchedulingPolicy = DEFAULT_POLICY) -> int:
        """The most rows that a layer computes in `ms`, at least `min_piece_rows`: fewer would read all weights for
        hardly any work."""
        low, high = policy.min_piece_rows, policy.min_piece_rows
        while high < MAX_ROWS and self.layer_ms(2 * high, context) <= ms:
            low = high = 2 * high
        step = low
        while step := step // 2:
            if self.layer_ms(low + step, context) <= ms:
                low += step
        return min(low, MAX_ROWS)


MAX_ROWS = 1 << 13
