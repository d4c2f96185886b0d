"""Exponentially weighted means: the newest sample weighs most, and nothing is stored but the mean.

Owns the two recurrences. Does not know clocks or what is averaged.
"""

from __future__ import annotations


class Ewma:
    """Exponentially weighted moving average: `value = decay * value + (1 - decay) * sample`.

    `initial`: the value before the first sample, which it is blended with. Without one the value is 0 at first and then
    the first sample. `bias_correction`: no sample weighs less than in a plain mean of all so far, so that the first few
    do not dominate (as in Adam). `value` may be set, to decay a mean towards something else between samples.
    """

    __slots__ = ("_bias_correction", "decay", "samples", "value")

    def __init__(self, decay: float, initial: float | None = None, *, bias_correction: bool = False) -> None:
        self.decay = decay
        self.value = 0.0 if initial is None else initial
        self.samples = 0 if initial is None else 1  # the initial value counts as one
        self._bias_correction = bias_correction

    def update(self, sample: float) -> float:
        """-> the new value."""
        self.samples += 1
        if self.samples == 1:
            self.value = sample
        elif self._bias_correction:
            self.value += max(1 - self.decay, 1 / self.samples) * (sample - self.value)
        else:
            self.value = self.decay * self.value + (1 - self.decay) * sample
        return self.value


class DecayedRatio:
    """One decayed sum over another, for samples of unequal size: hits over trials, tokens over milliseconds.

    Both sums decay alike with every `add`, so a sample's weight is in proportion to its size.
    """

    __slots__ = ("denominator", "numerator")

    def __init__(self, numerator: float = 0.0, denominator: float = 0.0) -> None:
        """The prior: sums to start from, as if they had been added."""
        self.numerator = numerator
        self.denominator = denominator

    @property
    def value(self) -> float:
        """Raises ZeroDivisionError if nothing was added."""
        return self.numerator / self.denominator

    def add(self, numerator: float, denominator: float, decay: float) -> None:
        """`decay`: the weight that the sums so far keep."""
        self.numerator = self.numerator * decay + numerator
        self.denominator = self.denominator * decay + denominator
