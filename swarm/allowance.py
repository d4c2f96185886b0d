"""A token bucket: so much at a steady rate, and some of it at once. Knows no clock; the time is an argument."""

from __future__ import annotations


class Allowance:
    """`rate` a second, and at most `burst` saved up; full at the start. `now` must not run backwards; where it does,
    nothing is gained."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._saved = burst
        self._updated_at: float | None = None

    def available(self, now: float) -> float:
        if self._updated_at is not None:
            self._saved = min(self._burst, self._saved + max(0.0, now - self._updated_at) * self._rate)
        self._updated_at = now
        return self._saved

    def take(self, amount: float, now: float) -> bool:
        """Whether there was as much; only then it is taken."""
        if self.available(now) < amount:
            return False
        self._saved -= amount
        return True

    def spend(self, amount: float) -> None:
        """Take what was found `available` before."""
        self._saved = max(0.0, self._saved - amount)
