"""Log-probabilities: torch's numbers, ties, and a result that no batch changes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from swarm.errors import ModelError
from swarm.messages import MAX_NEG_MICRONATS, WireLogprobs
from swarm_kernels.sampling.logprobs import token_logprobs


def test_they_are_those_of_torch() -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    logits = torch.randn(40, 3000) * 5
    tokens = [rng.randrange(3000) for _ in range(40)]
    expected = logits.double().log_softmax(-1)
    for row, logprobs in enumerate(token_logprobs(logits, tokens, 20)):
        assert logprobs.token == tokens[row]
        assert logprobs.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        best = expected[row].topk(20)
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_of_equals_the_lower_id_comes_first() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.0])
    (three,) = token_logprobs(logits[None], [5], 3)
    assert [token for token, _ in three.top] == [1, 3, 0]
    (all_of_them,) = token_logprobs(logits[None], [5], 20)
    assert [token for token, _ in all_of_them.top] == [1, 3, 0, 2, 4, 5]
    assert math.fsum(math.exp(value) for _, value in all_of_them.top) == pytest.approx(1.0)
    assert token_logprobs(logits[None], [1], 0)[0].top == ()


def test_a_row_alone_has_the_same_bits_as_in_any_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(70, 1001)
    tokens = list(range(70))
    together = token_logprobs(logits, tokens, 5)
    strided = torch.empty(70, 2002)[:, ::2].copy_(logits)
    assert token_logprobs(strided, tokens, 5) == together
    for row in random.Random(3).sample(range(70), 20):
        assert token_logprobs(logits[row : row + 1].clone(), [row], 5) == [together[row]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite(bad: float) -> None:
    logits = torch.randn(2, 50)
    logits[1, 7] = bad
    with pytest.raises(ModelError, match="not finite"):
        token_logprobs(logits, [0, 0], 2)


def test_a_token_that_cannot_come_has_a_bounded_number_on_the_wire() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    (logprobs,) = token_logprobs(logits, [1], 3)
    assert logprobs.logprob == -math.inf
    wired = WireLogprobs.of(logprobs)
    assert wired.neg_micronats == wired.top_neg_micronats[-1] == MAX_NEG_MICRONATS
    (usual,) = token_logprobs(torch.randn(1, 50), [3], 5)
    back = WireLogprobs.of(usual).to_logprobs(3)
    assert back.logprob == pytest.approx(usual.logprob, abs=1e-6)
    assert [token for token, _ in back.top] == [token for token, _ in usual.top]
