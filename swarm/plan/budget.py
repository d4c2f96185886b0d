"""How much work a decision may cost before it must settle for what it has.

Counts steps, a step being roughly a microsecond of Python, so that every node that plans from the same snapshot stops
at the same place and gets the same plan. A caller that would rather keep to wall-clock time hands in a clock; this
module reads none itself.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.errors import UsageError


class Budget:
    """`steps` of work, and `ms` milliseconds of `clock` (which returns seconds) if given; the first to run out counts.

    Raises UsageError for a negative limit, or `ms` without a clock.
    """

    def __init__(self, steps: int, ms: float | None = None, clock: Callable[[], float] | None = None) -> None:
        if steps < 0 or (ms is not None and not ms >= 0):
            raise UsageError(f"a budget of {steps} steps and {ms} ms is not one; both must be zero or more")
        if ms is not None and clock is None:
            raise UsageError("a budget in milliseconds needs a clock to be measured with")
        self._steps = steps
        self._clock = clock
        self._whole: Budget | None = None
        self._deadline = clock() + ms / 1000.0 if clock is not None and ms is not None else None

    def part(self, share: float) -> Budget:
        """`share` of the steps that are left; what is spent from it is spent here too."""
        part = Budget(max(int(self._steps * share), 0))
        part._whole = self
        return part

    def spend(self, steps: int = 1) -> bool:
        """Count `steps` of work; False once the budget is gone."""
        self._steps -= steps
        left = self._whole is None or self._whole.spend(steps)
        return left and self._steps > 0 and (self._deadline is None or not self._late())

    @property
    def spent(self) -> bool:
        if self._steps <= 0 or (self._deadline is not None and self._late()):
            return True
        return self._whole is not None and self._whole.spent

    def _late(self) -> bool:
        if self._deadline is None or self._clock is None or self._clock() < self._deadline:
            return False
        self._steps = 0
        return True
