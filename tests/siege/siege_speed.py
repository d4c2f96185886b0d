"""Tokens a second of one client that asks the same questions over and over, from few answers.

To count the tokens of a window would count where in an answer the window happens to begin and end: a prompt takes as
long as several tokens. So first tokens and following ones are timed apart, an interval that is only partly in a window
counts for that part, and the speed is that of an answer whose tokens take these times.

Pure: times come with the calls.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Window = tuple[float, float]
RESAMPLES = 500


@dataclass(frozen=True)
class Interval:
    """From the last token, or the question, until `tokens` more came (0: the answer failed). Times in seconds.

    `first`: they are the first of an answer. `answer`: its number.
    """

    begun: float
    ended: float
    first: bool
    answer: int
    tokens: int = 1


def tokens_per_s(intervals: Sequence[Interval], windows: Sequence[Window], length: int) -> float:
    """Of answers of `length` tokens, asked one after the other in `windows`; 0 if there was none."""
    return _speed([_parts(one, windows) for one in intervals], length)


def token_times_s(intervals: Sequence[Interval], windows: Sequence[Window]) -> tuple[float, float]:
    """Until an answer's first token, and for each that follows; 0 for what was not seen."""
    parts = [_parts(one, windows) for one in intervals]
    return _token_s(parts, True), _token_s(parts, False)


def ratio_range(
    intervals: Sequence[Interval], quiet: Sequence[Window], attacked: Sequence[Window], length: int, seed: int = 0
) -> tuple[float, float]:
    """Between what the ratio of the attacked speed to the quiet one may well be: 5 to 95% of resamples of answers
    (bootstrap; those of an answer are drawn together, as what slows one of its tokens slows others)."""
    rng = random.Random(seed)
    ratios = sorted(
        fast and slow / fast
        for _ in range(RESAMPLES)
        for fast, slow in [(_resampled(rng, intervals, quiet, length), _resampled(rng, intervals, attacked, length))]
    )
    return ratios[RESAMPLES // 20], ratios[-1 - RESAMPLES // 20]


_Part = tuple[bool, float, float]  # first, seconds in the windows, tokens in them


def _parts(one: Interval, windows: Sequence[Window]) -> _Part:
    inside = sum(max(0.0, min(one.ended, end) - max(one.begun, begin)) for begin, end in windows)
    return one.first, inside, one.tokens * inside / (one.ended - one.begun) if one.ended > one.begun else 0.0


def _speed(parts: Sequence[_Part], length: int) -> float:
    took_s = _token_s(parts, True) + (length - 1) * _token_s(parts, False)
    return length / took_s if took_s else 0.0


def _token_s(parts: Sequence[_Part], first: bool) -> float:
    seconds = sum(s for of_first, s, _ in parts if of_first == first)
    tokens = sum(t for of_first, _, t in parts if of_first == first)
    if not seconds:
        return 0.0
    return seconds / tokens if tokens else math.inf


def _resampled(rng: random.Random, intervals: Sequence[Interval], windows: Sequence[Window], length: int) -> float:
    answers: dict[int, list[_Part]] = {}
    for one in intervals:
        part = _parts(one, windows)
        if part[1]:
            answers.setdefault(one.answer, []).append(part)
    drawn = rng.choices(list(answers.values()), k=len(answers)) if answers else []
    return _speed([part for answer in drawn for part in answer], length)
