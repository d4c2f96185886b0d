"""A drafter together with what its model has written before (`draft.continuation_store`).

Owns how far either is trusted: the longer the context that was found, and the more often, the more the store counts.
Both are asked about the same place, so their probabilities are averaged; with `mixture` the store would have to be
right more often than the drafter wherever it says something, or would get what the drafter leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter, TokenPath, WrappingDrafter
from swarm_kernels.draft.continuation_store import LONGEST, Continuations, ContinuationStore


@dataclass(frozen=True, slots=True)
class StoreTrustPolicy:
    """`weights`: of the store, by the length of its match from 0 on; the drafter has the rest."""

    weights: tuple[float, ...] = (0.0, 0.0, 0.15, 0.3, 0.4, 0.45, 0.5)
    width: int = 8  # candidates of either that are averaged


class StoredDrafter(WrappingDrafter):
    """`inner`'s drafts and the store's. What the store says takes microseconds, so it is there before `inner` is
    called."""

    def __init__(self, inner: Drafter, store: ContinuationStore, policy: StoreTrustPolicy = StoreTrustPolicy()) -> None:
        super().__init__(inner.name, inner)
        self._store, self._policy = store, policy
        self._end: list[int] = []  # of the text
        self.cached_is_synchronous = inner.cached_is_synchronous

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._end = list(prompt_ids[-LONGEST:])
        self._inner.reset(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        self._end = [*self._end, *tokens][-LONGEST:]
        self._inner.extend(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        made = self._inner.propose_many(paths, max(width, self._policy.width))
        return [self._averaged(path, candidates, width) for path, candidates in zip(paths, made, strict=True)]

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        known = self._inner.propose_cached(paths, max(width, self._policy.width))
        made = [
            self._averaged(path, candidates, width) for path, candidates in zip(paths, known.candidates, strict=True)
        ]
        left = [
            max(0.0, 1.0 - math.fsum(math.exp(c.logprob) for c in candidates)) if open_mass else 0.0
            for candidates, open_mass in zip(made, known.unassigned_mass, strict=True)
        ]
        return CachedProposal(made, left)

    def _averaged(self, path: TokenPath, drafted: Sequence[Candidate], width: int) -> list[Candidate]:
        found = self._store.lookup([*self._end, *path][-LONGEST:], self._policy.width)
        weight = self._weight(found)
        probs = {candidate.token: (1.0 - weight) * math.exp(candidate.logprob) for candidate in drafted}
        for token, prob in found.probs if weight else ():
            probs[token] = probs.get(token, 0.0) + weight * prob
        ranked = sorted(((t, p) for t, p in probs.items() if p > 0), key=lambda item: -item[1])[:width]
        return [Candidate(token, min(0.0, math.log(prob))) for token, prob in ranked]

    def _weight(self, found: Continuations) -> float:
        return self._policy.weights[found.matched] * found.places / (found.places + 1)
