"""Drafting with models: only those that mean the same by a token; and the measuring of any drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from tiny_models import ModelTensors, tiny_model

from swarm.errors import DrafterFailed
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.model import ModelDrafter, check_vocabulary
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_training.distill.greedy import greedy_answers
from swarm_training.evaluation.evaluate import (
    Recorded,
    confidence_accuracy,
    hits_by_depth,
    likeliest_paths,
    tokens_per_step,
)

ANSWER = [(7 * i * i + 3) % 97 for i in range(40)]


class Words:
    """A tokenizer with one word a token."""

    def __init__(self, size: int, prefix: str = "w") -> None:
        self.vocab_size, self._prefix = size, prefix

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(f"{self._prefix}{token}" for token in ids)

    def encode(self, text: str) -> list[int]:
        return [len(text) % self.vocab_size]


class Oracle(Drafter):
    """Knows the answer; says it at `rank`, behind nonsense."""

    def __init__(self, answer: Sequence[int], rank: int) -> None:
        super().__init__("oracle")
        self._answer, self._rank, self._done = list(answer), rank, 0

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._done = 0

    def _advance(self, tokens: Sequence[int]) -> None:
        self._done += len(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [self._after(path, width) for path in paths]

    def _after(self, path: TokenPath, width: int) -> list[Candidate]:
        place = self._done + len(path)
        if tuple(self._answer[self._done : place]) != path or place >= len(self._answer):
            return []
        tokens = [1000 + i for i in range(width)]
        tokens[self._rank : self._rank + 1] = [self._answer[place]]
        return [Candidate(token, math.log(0.9 * 0.1**i)) for i, token in enumerate(tokens[:width])]


def test_a_model_of_the_same_vocabulary_drafts_its_own_answers() -> None:
    source = ModelTensors(tiny_model("llama"))
    drafter = ModelDrafter.local(source, Words(131), source, Words(131), max_tokens=64)
    prompt = [5, 6, 7]
    (answer,) = greedy_answers(source, [prompt], 12)
    hits = hits_by_depth(drafter, [Recorded(prompt, answer)], 2)
    assert hits[0][2] > 0.8  # it runs in 8 bits, the answer was made in bf16: near ties may turn
    assert drafter.acceptance.observed > 0


@pytest.mark.parametrize(
    ("vocab", "words"),
    [(131, Words(130)), (131, Words(131, "other")), (140, Words(131))],
    ids=["size", "words", "model"],
)
def test_another_vocabulary_is_one_sentence(vocab: int, words: Words) -> None:
    target, other = ModelTensors(tiny_model("llama")), ModelTensors(tiny_model("llama", vocab_size=vocab))
    other.name = "stranger"
    with pytest.raises(DrafterFailed, match="stranger cannot draft for tiny: its vocabulary is another one") as caught:
        check_vocabulary(other, words, target, Words(131))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rank", "expected"), [(0, (1.0, 1.0, 1.0)), (2, (0.0, 1.0, 1.0)), (6, (0.0, 0.0, 1.0))])
def test_hits_are_counted_by_rank_and_depth(rank: int, expected: tuple[float, ...]) -> None:
    hits = hits_by_depth(Oracle(ANSWER, rank), [Recorded([1], ANSWER)], 3, stride=2)
    assert [tuple(row) for row in hits] == [expected] * 3


def test_how_often_who_is_sure_is_right() -> None:
    """It is sure of its first guess everywhere: at half of the places rightly so."""
    half = [token if place % 2 else 9999 for place, token in enumerate(ANSWER)]
    assert confidence_accuracy(Oracle(half, 0), [Recorded([1], ANSWER)]) == (1.0, 0.5)
    assert confidence_accuracy(NgramDrafter(), [Recorded([1], ANSWER)])[0] < 0.5


def test_tokens_a_round_of_who_knows_all_and_who_knows_nothing() -> None:
    records = [Recorded([1], ANSWER), Recorded([2], ANSWER)]
    assert tokens_per_step(Oracle(ANSWER, 0), records, nodes=8, depth=4) == pytest.approx(5.0)  # 40 in rounds of 5
    assert tokens_per_step(Oracle([9999] * 50, 0), records, nodes=8, depth=4) == 1.0


def test_a_path_is_kept_only_with_its_beginnings() -> None:
    drafter = Oracle(ANSWER, 1)
    drafter.reset([1])
    paths = likeliest_paths(drafter, 6, 4, 3)
    assert len(paths) == 6
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
