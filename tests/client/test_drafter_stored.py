"""A drafter averaged with what the model has written before."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from swarm.types import TappedRows, Taps
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.stored import StoredDrafter, StoreTrustPolicy
from swarm_kernels.draft.continuation_store import END, ContinuationStore

STORE = ContinuationStore(torch.tensor([1, 2, 3, 4, 5, END, 1, 2, 3, 4, 6, END, 1, 2, 3, 4, 5, END]))


class Sure(Drafter):
    """Always of token 9, once it is asked."""

    def __init__(self) -> None:
        super().__init__("sure")
        self.rows: TappedRows = {}
        self.asked = False

    @property
    def taps(self) -> Taps | None:
        return Taps((1,), 4)

    def set_taps(self, rows: TappedRows) -> None:
        self.rows = rows

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.asked = False

    def _advance(self, tokens: Sequence[int]) -> None:
        self.asked = False

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        self.asked = True
        return [[Candidate(9, math.log(0.8))] for _ in paths]

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        if self.asked:
            return CachedProposal(self._draft(paths, width), [0.0 for _ in paths])
        return CachedProposal([[] for _ in paths], [1.0 for _ in paths])


def test_the_store_speaks_at_once_and_the_drafter_when_it_is_called() -> None:
    drafter = StoredDrafter(Sure(), STORE, StoreTrustPolicy(weights=(0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5)))
    drafter.reset([7, 1, 2, 3, 4])
    (early,), (left,) = drafter.propose_cached([()], 4)
    assert [c.token for c in early] == [5, 6]
    assert 0.5 < left < 1.0, "the drafter has not been asked"
    (made,) = drafter.propose_many([()], 4)
    probs = {c.token: math.exp(c.logprob) for c in made}
    weight = 0.5 * 3 / 4  # three places
    assert probs[9] == pytest.approx((1 - weight) * 0.8)
    assert probs[5] == pytest.approx(2 * probs[6])
    assert sum(probs.values()) <= 1.0
    assert drafter.propose_cached([()], 4).unassigned_mass == [0.0]


def test_paths_and_committed_tokens_are_context() -> None:
    drafter = StoredDrafter(Sure(), STORE)
    drafter.reset([1, 2])
    for paths in ([(3, 4)], [(8,)]):
        (made,) = drafter.propose_many(paths, 4)
        assert (5 in [c.token for c in made]) == (paths == [(3, 4)])
    drafter.extend([3])
    drafter.extend([4])
    assert 5 in [c.token for c in drafter.propose((), 4)]
    assert [c.token for c in drafter.propose((8, 8), 4)] == [9], "what it has not seen is the drafter's alone"


def test_it_is_its_drafter_to_the_rest() -> None:
    inner = Sure()
    mixed = MixtureDrafter([NgramDrafter(), StoredDrafter(inner, STORE)])
    assert mixed.taps == inner.taps
    mixed.reset([1, 2])
    mixed.set_taps({0: (b"x",)})
    assert inner.rows == {0: (b"x",)}
    mixed.close()
