"""Sampling of the next token. The tail samples from the target's logits; draft tokens are only compared with the
result.

Owns the random numbers, the order of the filters and how they break ties. A sample depends on the logits, the sampling
parameters, the position and the history, and on nothing else: not on batching, chain, machine or earlier samples. So
speculative decoding changes the speed and never the text.

Filters come in transformers' order: repetition penalty, temperature, top-k, top-p. The kept tokens stay in the order of
their ids when the cumulative distribution is inverted, so that a rounding error moves a boundary by its own size
instead of swapping two neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import InvalidRequest, ModelError
from swarm.types import Sampling

__all__ = ["History", "sample", "sample_rows", "uniform", "validate_sampling"]

History = Collection[int] | npt.NDArray[np.int64]
"""The prompt and the tokens so far, in any order; read only when there is a repetition penalty."""

_Scores = npt.NDArray[np.float32]
_WORD = 0xFFFFFFFF
_BLOCK = 256


def validate_sampling(sampling: Sampling) -> Sampling:
    """`sampling` itself if every value is in range. Raises InvalidRequest."""
    _check_range("temperature", sampling.temperature, 0.0, 100.0)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be above 0; 1 turns it off")
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    _check_whole("top_k", sampling.top_k, 1 << 20)
    _check_whole("seed", sampling.seed, (1 << 63) - 1)
    return sampling


def _check_range(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def _check_whole(name: str, value: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from 0 to {high}, not {value!r}")


def sample(logits: torch.Tensor, sampling: Sampling, position: int, history: History = ()) -> int:
    """The token at `position`, sampled from `logits [vocab]` fp32. Greedy takes the lowest id of the largest logit.

    Raises ModelError if the logits are not finite, InvalidRequest if `history` holds ids outside the vocabulary.
    """
    return _sample(logits.detach().float().cpu().numpy(), sampling, position, history)


def sample_rows(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int], histories: Sequence[History]
) -> list[int]:
    """`sample` for each row of `logits [m, vocab]`."""
    rows = logits.detach().float().cpu().numpy()
    if all(s.temperature == 0 and s.repetition_penalty == 1 for s in samplings):
        tokens = rows.argmax(axis=1)
        _check_finite(rows[np.arange(len(rows)), tokens])
        return [int(token) for token in tokens]
    return [_sample(*row) for row in zip(rows, samplings, positions, histories, strict=True)]


def _sample(scores: _Scores, sampling: Sampling, position: int, history: History) -> int:
    if sampling.repetition_penalty != 1 and len(history):
        scores = _penalized(scores, sampling.repetition_penalty, history)
    best = int(scores.argmax())  # the first NaN, if there is one
    _check_finite(scores[best])
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    return _sample_filtered(scores, sampling, uniform(sampling.seed, position), scores[best])


def _check_finite(values: _Scores | np.float32) -> None:
    if not np.isfinite(values).all():
        raise ModelError("the model's output is not finite; its weights or a node of the chain are damaged")


def _penalized(scores: _Scores, penalty: float, history: History) -> _Scores:
    seen = history if isinstance(history, np.ndarray) else np.fromiter(history, np.int64, len(history))
    if seen.min() < 0 or seen.max() >= len(scores):
        raise InvalidRequest(f"a token of the history is outside the vocabulary of {len(scores)}")
    scores = scores.copy()
    picked = scores[seen]
    scores[seen] = np.where(picked < 0, picked * np.float32(penalty), picked / np.float32(penalty))
    return scores


def _sample_filtered(scores: _Scores, sampling: Sampling, point: float, best: np.float32) -> int:
    """Invert the cumulative distribution of the filtered tokens at `point` in [0, 1)."""
    kept: npt.NDArray[np.int64] | None = None  # ids, ascending; None: all
    if 0 < sampling.top_k < len(scores):
        threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        kept = np.flatnonzero(scores >= threshold)  # ties at the threshold are kept, as in transformers
        scores = scores[kept]
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: exp(-inf) is the right 0
        weights = np.exp((scores - best) / np.float32(max(sampling.temperature, 1e-30)))
    if sampling.top_p < 1:
        nucleus = _nucleus(weights, sampling.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    index = _invert(weights, point)
    return index if kept is None else int(kept[index])


def _nucleus(weights: _Scores, top_p: float) -> npt.NDArray[np.int64]:
    """Ids, ascending, of the smallest set of likeliest tokens with mass `top_p`; of equally likely ones the lower
    ids."""
    goal = top_p * float(weights.sum(dtype=np.float64))
    for floor in (0.1, 1e-3, 1e-5, -1.0):  # times the largest weight, 1: sorting a whole vocabulary is slow
        heavy = np.flatnonzero(weights > floor)
        order = heavy[np.argsort(-weights[heavy], kind="stable")]
        mass = np.cumsum(weights[order], dtype=np.float64)
        if mass[-1] >= goal:
            break
    inside = 1 + int(np.searchsorted(mass[:-1], goal, side="left"))
    return np.sort(order[:inside])


def _invert(weights: _Scores, point: float) -> int:
    """The first index whose cumulative weight exceeds `point` of the total. By blocks: one long sum is slow."""
    whole = len(weights) // _BLOCK * _BLOCK
    blocks = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(blocks, weights[whole:].sum(dtype=np.float64)))
    target = point * ends[-1]
    block = int(np.searchsorted(ends[:-1], target, side="right"))
    before = ends[block - 1] if block else 0.0
    part = weights[block * _BLOCK : (block + 1) * _BLOCK]
    index = int(np.searchsorted(np.cumsum(part, dtype=np.float64), target - before, side="right"))
    if index < len(part):
        return block * _BLOCK + index
    return int(np.flatnonzero(weights[: block * _BLOCK + len(part)])[-1])  # rounding error went past the last one


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with key `seed` and counter
    `position`.
    """
    high, low, _, _ = philox((position & _WORD, position >> 32 & _WORD, 0, 0), (seed & _WORD, seed >> 32 & _WORD))
    return math.ldexp((high << 32 | low) >> 11, -53)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds, on 32-bit words."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right & _WORD, (left >> 32) ^ d ^ m, left & _WORD
        k, m = (k + 0x9E3779B9) & _WORD, (m + 0xBB67AE85) & _WORD
    return a, b, c, d
