"""Acceptance rates of a drafter by depth and rank, which `planner.speculation` decides from.

Owns the counting and the prior for few observations. Knows no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.ewma import DecayedRatio
from swarm.planner.speculation.static_tree import AcceptanceTable, check_acceptance

DEFAULT_PRIOR = (0.3, 0.1, 0.05, 0.03)
STRENGTH = 8.0
"""The weight of the prior, in observations."""
DECAY = 0.99
"""Of an observation's weight with every later one of its depth: text changes its kind within one answer."""


class AcceptanceRates:
    """Exponentially decayed counts. `observe` as drafts are verified; `table()` when a policy is chosen.

    `prior`: the first level's row before anything was seen. A deeper level's prior is the level above
    it, for acceptance falls slowly with depth and deep levels are observed rarely.
    """

    def __init__(
        self, prior: Sequence[float] = DEFAULT_PRIOR, strength: float = STRENGTH, decay: float = DECAY
    ) -> None:
        check_acceptance([prior])
        self._prior = tuple(prior)
        self._strength, self._decay = strength, decay
        self._depths: list[_Counts] = []
        self.observed = 0

    def observe(self, depth: int, rank: int | None, width: int) -> None:
        """A proposal of at most `width` tokens for the level `depth` (0: right after the committed text) was
        verified.

        `rank`: which of its tokens was the target's; None: none was. All drafts above it were accepted, or it could not
        have been verified.
        """
        while len(self._depths) <= depth:
            self._depths.append(_Counts())
        self._depths[depth].add(rank, width, self._decay)
        self.observed += 1

    def table(self, depths: int, ranks: int | None = None) -> AcceptanceTable:
        """`[depths][ranks]`, each row's sum at most 1. `ranks`: by default as many as were ever proposed."""
        seen = max((len(counts.ranks) for counts in self._depths), default=0)
        count = ranks if ranks is not None else max(len(self._prior), seen)
        row = _padded(self._prior, count)
        rows = []
        for depth in range(depths):
            if depth < len(self._depths):
                row = self._depths[depth].row(row, self._strength)
            rows.append(row)
        return tuple(rows)

    def hit_rate(self, depth: int = 0) -> float:
        """The part of the verified proposals for this level with the target's token; 0 before there was one."""
        if depth >= len(self._depths) or not self._depths[depth].ranks:
            return 0.0
        return min(1.0, math.fsum(hits.value for hits in self._depths[depth].ranks))


class _Counts:
    """One level: how often each rank was proposed, and how often it was accepted."""

    def __init__(self) -> None:
        self.ranks: list[DecayedRatio] = []

    def add(self, rank: int | None, width: int, decay: float) -> None:
        while len(self.ranks) < width:
            self.ranks.append(DecayedRatio())
        for i, hits in enumerate(self.ranks[:width]):
            hits.add(i == rank, 1.0, decay)

    def row(self, expected: Sequence[float], strength: float) -> tuple[float, ...]:
        hits = _padded([rank.numerator for rank in self.ranks], len(expected))
        trials = _padded([rank.denominator for rank in self.ranks], len(expected))
        row = [(strength * p + h) / (strength + t) for p, h, t in zip(expected, hits, trials, strict=True)]
        total = math.fsum(row)  # above 1 only when ranks were proposed unequally often
        return tuple(p / max(1.0, total) for p in row)


def _padded(values: Sequence[float], count: int) -> tuple[float, ...]:
    """Cut or padded with zeros to `count`."""
    return tuple(values[:count]) + (0.0,) * (count - len(values))
