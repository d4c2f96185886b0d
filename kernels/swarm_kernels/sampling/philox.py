"""Counter-based random numbers (docs/decisions/0007-counter-based-sampling.md): no state, and no order of calls."""

from __future__ import annotations

import math

_WORD = 0xFFFFFFFF


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with key `seed` and counter
    `position`.
    """
    high, low, _, _ = philox((position & _WORD, position >> 32 & _WORD, 0, 0), (seed & _WORD, seed >> 32 & _WORD))
    return math.ldexp((high << 32 | low) >> 11, -53)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds, on 32-bit words."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right & _WORD, (left >> 32) ^ d ^ m, left & _WORD
        k, m = (k + 0x9E3779B9) & _WORD, (m + 0xBB67AE85) & _WORD
    return a, b, c, d
