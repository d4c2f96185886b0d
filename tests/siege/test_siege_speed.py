"""The speed of a client from few answers: the same wherever a window begins, and known better with more of them."""

from __future__ import annotations

import pytest
from siege_speed import Interval, ratio_range, token_times_s, tokens_per_s

LENGTH = 16


def answers(count: int, first_s: float, next_s: float, begin: float = 0.0, number: int = 0) -> list[Interval]:
    made: list[Interval] = []
    at = begin
    for answer in range(number, number + count):
        for token in range(LENGTH):
            took = first_s if token == 0 else next_s
            made.append(Interval(at, at + took, token == 0, answer))
            at += took
    return made


@pytest.mark.parametrize("begin", [10.0, 10.3, 11.1, 12.7, 13.9])
def test_where_a_window_begins_does_not_matter(begin: float) -> None:
    intervals = answers(20, 1.0, 0.2)  # 4 s each
    assert token_times_s(intervals, [(begin, begin + 5.0)]) == pytest.approx((1.0, 0.2))
    assert tokens_per_s(intervals, [(begin, begin + 5.0)], LENGTH) == pytest.approx(4.0)


def test_a_window_with_no_first_token_counts_what_there_is() -> None:
    assert tokens_per_s(answers(1, 1.0, 0.2), [(2.0, 3.0)], LENGTH) == pytest.approx(LENGTH / (15 * 0.2))


def test_a_pause_counts_as_time() -> None:
    intervals = [Interval(0.0, 1.0, True, 0), Interval(1.0, 6.0, False, 0)]
    assert tokens_per_s(intervals, [(0.0, 6.0)], LENGTH) == pytest.approx(LENGTH / (1.0 + 15 * 5.0))


def test_failed_answers_count_as_time_without_tokens() -> None:
    intervals = [*answers(1, 1.0, 0.2), Interval(4.0, 8.0, True, 1, tokens=0)]
    assert tokens_per_s(intervals, [(0.0, 8.0)], LENGTH) == pytest.approx(LENGTH / (5.0 + 3.0))
    assert tokens_per_s([Interval(0.0, 8.0, True, 0, tokens=0)], [(0.0, 8.0)], LENGTH) == 0.0
    assert tokens_per_s([], [(0.0, 8.0)], LENGTH) == 0.0


def test_several_tokens_at_once_count_each() -> None:
    intervals = [Interval(0.0, 1.0, True, 0), Interval(1.0, 4.0, False, 0, tokens=15)]
    assert tokens_per_s(intervals, [(0.0, 4.0)], LENGTH) == pytest.approx(4.0)


def test_the_range_holds_the_ratio_and_is_narrow_where_answers_agree() -> None:
    even = [*answers(4, 1.0, 0.2), *answers(4, 2.0, 0.4, begin=16.0, number=4)]
    low, high = ratio_range(even, [(0.0, 16.0)], [(16.0, 48.0)], LENGTH)
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(0.5)
    uneven = [*answers(2, 1.0, 0.1), *answers(2, 1.0, 0.4, begin=5.0, number=2), *answers(4, 2.0, 0.5, 19.0, 4)]
    low, high = ratio_range(uneven, [(0.0, 19.0)], [(19.0, 57.0)], LENGTH)
    assert low < tokens_per_s(uneven, [(19.0, 57.0)], LENGTH) / tokens_per_s(uneven, [(0.0, 19.0)], LENGTH) < high
