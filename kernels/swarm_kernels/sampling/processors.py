"""What changes the logits of a row before a token is taken from them: bias, penalties, and the tokens allowed.

In transformers' order, see `types.Sampling`. Knows nothing of temperature, filters and random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm.errors import InvalidRequest, ModelError
from swarm.types import Sampling

Scores = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


def changes_logits(sampling: Sampling) -> bool:
    """Whether `process` changes anything for a row in which all tokens are allowed."""
    return bool(sampling.logit_bias) or penalizes(sampling)


def process(
    scores: Scores,
    sampling: Sampling,
    history: Sequence[int] | TokenIds,
    prompt_tokens: int,
    allowed: npt.NDArray[np.bool_] | None,
) -> Scores:
    """`scores [vocab]` after bias, penalties and mask; the argument itself stays as it was.

    `history`: the tokens up to this row, of which the first `prompt_tokens` are the prompt. `allowed [vocab]`: None
    for all. Raises InvalidRequest for ids outside the vocabulary, ModelError if no token is allowed.
    """
    penalized = penalizes(sampling) and len(history) > 0
    if not sampling.logit_bias and not penalized:
        return scores if allowed is None else _masked(scores, allowed)
    scores = scores.copy()
    if sampling.logit_bias:
        tokens, values = _bias(sampling.logit_bias)
        _check_vocabulary(tokens, len(scores))
        scores[tokens] += values
    if penalized:
        seen = np.asarray(history, np.int64)
        _check_vocabulary(seen, len(scores))
        _penalize(scores, sampling, seen, prompt_tokens)
    return scores if allowed is None else _masked(scores, allowed)


def penalizes(sampling: Sampling) -> bool:
    """Whether `process` reads the history."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _penalize(scores: Scores, sampling: Sampling, seen: TokenIds, prompt_tokens: int) -> None:
    """In place: multiply or divide what occurs in the text (Keskar et al., 2019), then subtract by what occurs in the
    answer, as OpenAI and vLLM do."""
    if sampling.repetition_penalty != 1.0:
        penalty, picked = np.float32(sampling.repetition_penalty), scores[seen]
        with np.errstate(over="ignore"):
            scores[seen] = np.where(picked < 0, picked * penalty, picked / penalty)
    if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        tokens, counts = np.unique(seen[prompt_tokens:], return_counts=True)
        scores[tokens] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        scores[tokens] -= np.float32(sampling.presence_penalty)


def _masked(scores: Scores, allowed: npt.NDArray[np.bool_]) -> Scores:
    masked = np.where(allowed, scores, np.float32(-np.inf))
    if masked.max() == -np.inf:
        raise ModelError("the grammar allows no token after this text")
    return masked


@functools.lru_cache(maxsize=256)
def _bias(logit_bias: tuple[tuple[int, float], ...]) -> tuple[TokenIds, Scores]:
    tokens, values = zip(*logit_bias, strict=True)
    return np.array(tokens, np.int64), np.array(values, np.float32)


def _check_vocabulary(tokens: TokenIds, vocab_size: int) -> None:
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InvalidRequest(f"a token of the history or of logit_bias is outside the vocabulary of {vocab_size}")
