"""Draft tokens of the Medusa heads that the tail runs on its own last hidden states; they arrive with its results.

Owns only which of them are for which position: a head drafts a position, whatever was sampled in between (Cai et al.
2024, §2.1; Jupiter §IV). A tail without heads sends none, and then this drafter proposes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.messages import StepResult
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath

NUM_CANDIDATES = 4  # of each head, with every sampled token


def medusa_candidates(result: StepResult) -> tuple[MedusaCandidates, ...]:
    """The candidates for each token of a result; () if there are none, or if the lengths do not match."""
    tokens, heads, count = len(result.tokens), result.num_medusa_heads, len(result.medusa_ids)
    centinats = result.medusa_neg_logprob_centinats
    if not count or not tokens * heads or count % (tokens * heads) or len(centinats) != count:
        return ()
    width = count // (tokens * heads)
    pairs = [(token, -cost / 100) for token, cost in zip(result.medusa_ids, centinats, strict=True)]
    ranked = [tuple(pairs[at : at + width]) for at in range(0, count, width)]
    return tuple(tuple(ranked[at : at + heads]) for at in range(0, len(ranked), heads))


class MedusaDrafter(Drafter):
    """It has the candidates already, so every call is synchronous."""

    is_synchronous = extend_is_synchronous = True

    def __init__(self, name: str = "heads") -> None:
        super().__init__(name)
        self._candidates: MedusaCandidates = ()

    def set_medusa_candidates(self, candidates: MedusaCandidates) -> None:
        self._candidates = candidates

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._candidates = ()

    def _advance(self, tokens: Sequence[int]) -> None:
        self._candidates = self._candidates[len(tokens) :]

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        candidates = self._candidates
        return [
            [Candidate(*pair) for pair in candidates[len(path)][:width]] if len(path) < len(candidates) else []
            for path in paths
        ]
