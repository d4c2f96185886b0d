"""Drafters whose accuracy is set by hand, for tests of the engine apart from any drafter's quality."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from swarm.types import TappedRows
from swarm_client.speculation.drafters.acceptance import AcceptanceRates
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.tapped import TappedDrafter
from swarm_kernels.draft.tapped import TappedDraft


class Oracle(Drafter):
    """Drafts a given answer. A level's candidates hold the right token with probability `rate`, first in `first` of
    these.

    `ranks`: how many ranks the right token may have. `torn`: the fraction of positions where it is uncertain;
    everywhere else it is right, so `rate` and `first` hold on average. `frank`: its log-probs show which these are.
    """

    def __init__(
        self,
        answer: Sequence[int],
        rate: float = 1.0,
        first: float = 0.8,
        *,
        seed: int = 0,
        vocab: int = 131,
        fail_after: int | None = None,
        ranks: int = 3,
        torn: float = 1.0,
        frank: bool = True,
    ) -> None:
        self.row = _row(rate * first, rate * (1 - first), ranks)
        super().__init__("oracle", AcceptanceRates(self.row))
        missing, later = (1 - rate) / torn, rate * (1 - first) / torn
        self.torn_row = _row(1 - missing - later, later, ranks)
        self.answer, self.torn, self.frank = answer, torn, frank
        self.seed, self.vocab, self.fail_after = seed, vocab, fail_after
        self.known = self.prompt = self.queries = 0

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.known = self.prompt = len(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        self.known += len(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        self.queries += 1
        if self.fail_after is not None and self.queries > self.fail_after:
            raise RuntimeError("the oracle fails on purpose")
        return [self._candidates(path, width) for path in paths]

    def _candidates(self, path: TokenPath, width: int) -> list[Candidate]:
        at = self.known + len(path) - self.prompt
        true = self.answer[at] if at < len(self.answer) else 0
        # The same position gives the same candidates, or a second query would raise the rate.
        rng = random.Random(f"{self.seed}/{at}/{path[-4:]}")
        row = self.torn_row if random.Random(f"{self.seed}/{at}").random() < self.torn else (1.0,)
        others = [t for t in rng.sample(range(self.vocab), min(width + 1, self.vocab)) if t != true][:width]
        (rank,) = rng.choices(range(len(row) + 1), (*row, max(0.0, 1 - sum(row))))
        tokens = [*others[:rank], true, *others[rank:]][:width] if rank < len(row) else others
        claims = (*(row if self.frank else self.row), *(0.001 for _ in range(width)))
        return [Candidate(token, math.log(max(p, 1e-3))) for token, p in zip(tokens, claims, strict=False)]


def _row(first: float, others: float, ranks: int) -> tuple[float, ...]:
    """Probabilities by rank: `others` shared by the ranks after the first, each with less than the one before."""
    shares = [0.7**i for i in range(ranks - 1)]
    return (first, *(others * share / sum(shares) for share in shares))


class Noise(Oracle):
    """Random tokens with high confidence, and sometimes none at all."""

    def _candidates(self, path: TokenPath, width: int) -> list[Candidate]:
        rng = random.Random(f"{self.seed}/{self.known}/{path}")
        tokens = rng.sample(range(self.vocab), rng.randint(0, width))
        return [Candidate(token, -rng.random()) for token in tokens]


class Recorded(TappedDrafter):
    """Keeps the hidden states that came."""

    def __init__(self, head: TappedDraft) -> None:
        super().__init__(head)
        self.rows: dict[int, tuple[bytes, ...]] = {}
        self.times_sent = 0

    def set_taps(self, rows: TappedRows) -> None:
        self.times_sent += len(rows)
        self.rows.update(rows)
        super().set_taps(rows)
