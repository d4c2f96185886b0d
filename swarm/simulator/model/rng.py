"""Random numbers that depend on a seed and a name only.

Owns the generator: SplitMix64 (Steele et al., OOPSLA 2014) with one stream per name, so that more draws in one place of
the simulator change nothing elsewhere. Plain integer arithmetic: the same numbers on every machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

_MASK = (1 << 64) - 1
T = TypeVar("T")


class NamedStream:
    """Independent draws for one purpose; `path` names it."""

    def __init__(self, seed: int, *path: str | int) -> None:
        named = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
        self._state = int.from_bytes(named, "big")

    def bits(self) -> int:
        """64 of them."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """In `[low, high)`."""
        return low + (high - low) * ((self.bits() >> 11) / (1 << 53))

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.uniform())

    def normal(self) -> float:
        """Mean 0, variance 1 (Box and Muller)."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(sigma * self.normal())

    def below(self, count: int) -> int:
        """A whole number in `[0, count)`."""
        return int(self.uniform() * count)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
