"""Sources of guesses whose accuracy is set by hand, for tests of the engine apart from any drafter's quality."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.errors import DrafterFailed
from swarm.plan.arca import AcceptanceTable
from swarm_client.drafters.base import Candidate


@dataclass
class Oracle:
    """Knows the answer. A level's guesses hold the right token with probability `rate`, first with `first` of these."""

    answer: Sequence[int]
    rate: float = 1.0
    first: float = 0.8
    seed: int = 0
    vocab: int = 131
    fail_after: int | None = None
    name: str = "oracle"
    known: list[int] = field(default_factory=list)
    prompt: int = 0
    asked: int = 0

    async def reset(self, prompt_ids: Sequence[int]) -> None:
        self.known, self.prompt = list(prompt_ids), len(prompt_ids)

    async def extend(self, tokens: Sequence[int]) -> None:
        self.known += tokens

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        self.asked += 1
        if self.fail_after is not None and self.asked > self.fail_after:
            raise DrafterFailed("the oracle has lost its voice")
        return [self._guess(path, width) for path in paths]

    def acceptance(self, depths: int) -> AcceptanceTable:
        rest = self.rate * (1 - self.first)
        return ((self.rate * self.first, rest / 2, rest / 2),) * depths

    def _guess(self, path: Sequence[int], width: int) -> list[Candidate]:
        at = len(self.known) + len(path) - self.prompt
        true = self.answer[at] if at < len(self.answer) else 0
        # The same place gives the same guess, or a drafter asked twice would be right more often than it says.
        rng = random.Random(f"{self.seed}/{at}/{tuple(path)}")
        others = [t for t in rng.sample(range(self.vocab), min(width + 1, self.vocab)) if t != true][:width]
        tokens = others
        if rng.random() < self.rate:
            rank = 0 if rng.random() < self.first else rng.randint(1, 2)
            tokens = [*others[:rank], true, *others[rank:]][:width]
        row = (*self.acceptance(1)[0], *(0.01 for _ in range(width)))
        return [Candidate(token, math.log(max(p, 1e-3))) for token, p in zip(tokens, row, strict=False)]


@dataclass
class Noise(Oracle):
    """Any tokens, as sure of them as can be, and sometimes none at all."""

    name: str = "noise"

    def _guess(self, path: Sequence[int], width: int) -> list[Candidate]:
        rng = random.Random(f"{self.seed}/{len(self.known)}/{tuple(path)}")
        tokens = rng.sample(range(self.vocab), rng.randint(0, width))
        return [Candidate(token, -rng.random()) for token in tokens]
