"""Sources of guesses whose accuracy is set by hand, for tests of the engine apart from any drafter's quality."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from swarm_client.drafters.acceptance import Acceptance
from swarm_client.drafters.base import Candidate, Drafter, TokenPath


class Oracle(Drafter):
    """Knows the answer. A level's guesses hold the right token with probability `rate`, first with `first` of these."""

    def __init__(
        self,
        answer: Sequence[int],
        rate: float = 1.0,
        first: float = 0.8,
        *,
        seed: int = 0,
        vocab: int = 131,
        fail_after: int | None = None,
    ) -> None:
        rest = rate * (1 - first) / 2
        self.row = (rate * first, rest, rest)
        super().__init__("oracle", Acceptance(self.row))
        self.answer, self.rate, self.first = answer, rate, first
        self.seed, self.vocab, self.fail_after = seed, vocab, fail_after
        self.known = self.prompt = self.asked = 0

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.known = self.prompt = len(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        self.known += len(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        self.asked += 1
        if self.fail_after is not None and self.asked > self.fail_after:
            raise RuntimeError("the oracle has lost its voice")
        return [self._guess(path, width) for path in paths]

    def _guess(self, path: TokenPath, width: int) -> list[Candidate]:
        at = self.known + len(path) - self.prompt
        true = self.answer[at] if at < len(self.answer) else 0
        # The same place gives the same guess, or a drafter asked twice would be right more often than it says.
        rng = random.Random(f"{self.seed}/{at}/{path[-4:]}")
        others = [t for t in rng.sample(range(self.vocab), min(width + 1, self.vocab)) if t != true][:width]
        tokens = others
        if rng.random() < self.rate:
            rank = 0 if rng.random() < self.first else rng.randint(1, 2)
            tokens = [*others[:rank], true, *others[rank:]][:width]
        row = (*self.row, *(0.01 for _ in range(width)))
        return [Candidate(token, math.log(max(p, 1e-3))) for token, p in zip(tokens, row, strict=False)]


class Noise(Oracle):
    """Any tokens, as sure of them as can be, and sometimes none at all."""

    def _guess(self, path: TokenPath, width: int) -> list[Candidate]:
        rng = random.Random(f"{self.seed}/{self.known}/{path}")
        tokens = rng.sample(range(self.vocab), rng.randint(0, width))
        return [Candidate(token, -rng.random()) for token in tokens]
