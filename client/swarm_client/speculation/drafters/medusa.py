"""Guesses that came along with the tokens: those of the Medusa heads that the tail runs on its own last states.

Owns only which of them are for which place: a head guesses a place, whatever was drawn in between (Cai et al. 2024,
§2.1; Jupiter §IV). A tail without heads sends none, and then this drafter is silent.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.messages import StepResult
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath

NUM_CANDIDATES = 4  # of each head, with every token drawn


def medusa_candidates(result: StepResult) -> tuple[MedusaCandidates, ...]:
    """What came along with each token of a result; () if nothing did, or if it does not add up."""
    draws, heads, guesses = len(result.tokens), result.num_medusa_heads, len(result.medusa_ids)
    if (
        not guesses
        or not draws * heads
        or guesses % (draws * heads)
        or len(result.medusa_neg_logprob_centinats) != guesses
    ):
        return ()
    width = guesses // (draws * heads)
    pairs = [
        (token, -doubt / 100)
        for token, doubt in zip(result.medusa_ids, result.medusa_neg_logprob_centinats, strict=True)
    ]
    ranked = [tuple(pairs[at : at + width]) for at in range(0, guesses, width)]
    return tuple(tuple(ranked[at : at + heads]) for at in range(0, len(ranked), heads))


class MedusaDrafter(Drafter):
    """It has the guesses already, so asking it takes no time."""

    is_synchronous = extend_is_synchronous = True

    def __init__(self, name: str = "heads") -> None:
        super().__init__(name)
        self._hints: MedusaCandidates = ()

    def set_medusa_candidates(self, hints: MedusaCandidates) -> None:
        self._hints = hints

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._hints = ()

    def _advance(self, tokens: Sequence[int]) -> None:
        self._hints = self._hints[len(tokens) :]

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [
            [Candidate(*guess) for guess in self._hints[len(path)][:width]] if len(path) < len(self._hints) else []
            for path in paths
        ]
