"""How much work a search may do before it returns the best it has found.

Counts steps of roughly a microsecond of Python instead of time, so that every node that plans from the same snapshot
stops at the same place and gets the same plan.
"""

from __future__ import annotations

from swarm.errors import UsageError


class WorkBudget:
    """`steps` of work. Raises UsageError if negative."""

    def __init__(self, steps: int) -> None:
        if steps < 0:
            raise UsageError(f"a budget of {steps} steps is not one; it must be zero or more")
        self._steps = steps
        self._whole: WorkBudget | None = None

    def share(self, share: float) -> WorkBudget:
        """`share` of the steps that are left; what is spent from it is spent here too."""
        part = WorkBudget(max(int(self._steps * share), 0))
        part._whole = self
        return part

    def spend(self, steps: int = 1) -> bool:
        """Count `steps` of work; False once the budget is gone."""
        self._steps -= steps
        left = self._whole is None or self._whole.spend(steps)
        return left and self._steps > 0

    @property
    def spent(self) -> bool:
        return self._steps <= 0 or (self._whole is not None and self._whole.spent)
