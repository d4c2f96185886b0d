"""What a model has written before, for looking up how it goes on: some hundred thousand tokens of its own answers.

Owns the index, a suffix array cut off after eight tokens, and the estimate from it: by prediction by partial matching,
what the longest match leaves open goes to the next shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

END = -1
"""Between two texts."""

LONGEST, SHORTEST = 6, 2
"""Tokens of a context that are looked up."""

_HALF = 4  # tokens of 16 bits in one key
_MAX_MATCHES = 4096  # of a context that are counted
_MAX_TOKENS = 8_000_000


class Continuations(NamedTuple):
    """`matched`: tokens of the longest context that was found, 0 if none; `places`: how often. `probs`: by token,
    likeliest first."""

    matched: int
    places: int
    probs: list[tuple[int, float]]


class ContinuationStore:
    """Read-only; threads may share it."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """`tokens [n]`: ids of texts, END after each."""
        text = tokens[:_MAX_TOKENS].numpy().astype(np.int64)
        known = np.unique(text[text != END])[: 1 << 16]
        self._ids = known
        self._numbers = {int(token): number for number, token in enumerate(known, 1)}
        numbers = np.where(text == END, 0, np.searchsorted(known, text) + 1).astype(np.uint64)
        padded = np.concatenate([numbers, np.zeros(2 * _HALF, np.uint64)])
        first, second = _key(padded, 0, len(text)), _key(padded, _HALF, len(text))
        order = np.lexsort((second, first))
        self._first, self._second, self._order, self._text = first[order], second[order], order, padded

    def lookup(self, context: Sequence[int], width: int) -> Continuations:
        """What followed the end of `context`; at most `width` tokens a length."""
        numbers = [self._numbers.get(token, 0) for token in context[-LONGEST:]]
        probs: dict[int, float] = {}
        matched = places = 0
        left = 1.0
        for length in range(len(numbers), SHORTEST - 1, -1):
            low, high = self._range(numbers[len(numbers) - length :])
            if low >= high:
                continue
            following = self._text[self._order[low : min(high, low + _MAX_MATCHES)] + length]
            found, counts = np.unique(following, return_counts=True)
            total = int(counts.sum())
            if not matched:
                matched, places = length, total
            kept = np.argsort(-counts, kind="stable")[:width]
            share = left / (total + 0.5 * len(found) + 0.5)
            for number, count in zip(found[kept].tolist(), counts[kept].tolist(), strict=True):
                if number:
                    token = int(self._ids[number - 1])
                    probs[token] = probs.get(token, 0.0) + share * count
            left *= 1.0 - total / (total + 0.5 * len(found) + 0.5)
        return Continuations(matched, places, sorted(probs.items(), key=lambda item: -item[1])[:width])

    def _range(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Where the suffixes that begin with these lie."""
        if not all(numbers):
            return 0, 0
        low, high = _bounds(numbers[:_HALF])
        start, end = np.searchsorted(self._first, low, "left"), np.searchsorted(self._first, high, "right")
        if len(numbers) > _HALF and start < end:
            low, high = _bounds(numbers[_HALF:])
            part = self._second[start:end]  # sorted, as the first keys here are equal
            start, end = start + np.searchsorted(part, low, "left"), start + np.searchsorted(part, high, "right")
        return int(start), int(end)


def _key(padded: np.ndarray, offset: int, count: int) -> np.ndarray:
    key = np.zeros(count, np.uint64)
    for at in range(_HALF):
        key = (key << np.uint64(16)) | padded[offset + at : offset + at + count]
    return key


def _bounds(numbers: Sequence[int]) -> tuple[np.uint64, np.uint64]:
    """The least and the greatest key that begins with these."""
    low = 0
    for number in numbers:
        low = low << 16 | number
    rest = 16 * (_HALF - len(numbers))
    return np.uint64(low << rest), np.uint64((low << rest) | ((1 << rest) - 1))
