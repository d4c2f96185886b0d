"""The look-up: the automaton against plain searching of the text, and what it guesses from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UsageError
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.suffix_automaton import Match, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def built(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def occurs(run: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(run)] == run for i in range(len(text) - len(run) + 1))


def followers(run: list[int], text: list[int]) -> set[int]:
    return {text[i + len(run)] for i in range(len(text) - len(run)) if text[i : i + len(run)] == run}


@given(TEXTS)
def test_the_match_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    match = built(text).match
    assert match.length == max((n for n in range(len(text)) if occurs(text[len(text) - n :], text[:-1])), default=0)


@given(TEXTS, TEXTS)
def test_a_step_finds_the_longest_suffix_that_occurs(text: list[int], path: list[int]) -> None:
    automaton = built(text)
    match = automaton.match
    for end, token in enumerate(path, 1):
        match = automaton.step(match, token)
        said = (text + path[:end])[-match.length :] if match.length else []
        assert occurs(said, text)
        # longer ones that begin in the text and end in the path are only those that the match before allowed
        longer = path[:end][-(match.length + 1) :]
        assert len(longer) <= match.length or not occurs(longer, text)


@given(TEXTS)
def test_followers_are_what_came_after_each_suffix(text: list[int]) -> None:
    automaton = built(text)
    suffixes = list(automaton.suffixes(automaton.match))
    assert [length for length, _ in suffixes] == sorted({length for length, _ in suffixes}, reverse=True)
    for length, seen in suffixes:
        assert set(seen) == followers(text[len(text) - length :], text)
        for token, follower in seen.items():
            assert follower.count >= 1
            assert text[follower.latest] == token


@given(TEXTS)
def test_it_has_at_most_two_states_a_token(text: list[int]) -> None:
    assert len(built(text)) <= max(1, 2 * len(text))


@given(TEXTS, TEXTS, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 5))
def test_text_in_pieces_guesses_as_text_in_one(
    prompt: list[int], answer: list[int], path: list[int], width: int
) -> None:
    whole, pieces = NgramDrafter(), NgramDrafter()
    whole.reset(prompt + answer)
    pieces.reset(prompt)
    for token in answer:
        pieces.propose(path, width)
        pieces.extend([token])
    assert pieces.propose(path, width) == whole.propose(path, width)


@given(TEXTS, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 5))
def test_guesses_are_different_ranked_and_together_at_most_certain(
    text: list[int], path: list[int], width: int
) -> None:
    drafter = NgramDrafter()
    drafter.reset(text)
    guesses = drafter.propose(path, width)
    assert len({guess.token for guess in guesses}) == len(guesses) <= width
    assert [g.logprob for g in guesses] == sorted((g.logprob for g in guesses), reverse=True)
    assert math.fsum(math.exp(g.logprob) for g in guesses) <= 1 + 1e-9
    assert {guess.token for guess in guesses} <= set(text)


def test_repeated_text_is_drafted_to_its_end() -> None:
    text = list(range(100, 140))
    drafter = NgramDrafter()
    drafter.reset([*text, 7, 8, 9, *text[:5]])
    path: list[int] = []
    for expected in text[5:]:
        best = drafter.propose(path, 1)[0]
        assert best.token == expected
        path.append(best.token)
    assert math.exp(drafter.propose(path[:30], 1)[0].logprob) > 0.8  # a long match is believed


def test_what_was_said_last_is_said_again() -> None:
    drafter = NgramDrafter()
    drafter.reset([1, 2, 9, 1, 3, 9, 1])
    assert [guess.token for guess in drafter.propose((), 2)] == [3, 2]


def test_belief_follows_what_was_seen() -> None:
    """After text where matches of one token always come true, they are believed more than after noise."""
    regular, noisy = NgramDrafter(), NgramDrafter()
    regular.reset([1, 2] * 50)
    noisy.reset([1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 7, 1, 8, 1, 9, 1, 10, 1, 11, 1, 12, 1, 13, 1])
    assert regular.propose((), 1)[0].logprob > math.log(0.8)
    assert noisy.propose((), 1)[0].logprob < math.log(0.4)


def test_an_unknown_token_ends_what_is_known() -> None:
    drafter = NgramDrafter()
    drafter.reset([1, 2, 3])
    assert drafter.propose([77], 4) == []
    assert SuffixAutomaton().step(Match(), 5) == Match()
    assert NgramDrafter().propose((), 4) == []


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(UsageError):
        NgramDrafter().propose((), 0)


def test_acceptance_is_measured_by_rank_and_depth() -> None:
    drafter = NgramDrafter()
    drafter.reset([1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    drafter.propose_many([(), (3,), (3, 4), (9,)], 2)
    drafter.extend([3])  # right at depth 0
    drafter.extend([4, 7])  # right at depth 1, wrong at depth 2
    assert drafter.acceptance.observed == 3
    assert drafter.acceptance.hit_rate(0) == 1.0
    assert drafter.acceptance.hit_rate(1) == 1.0
    assert drafter.acceptance.hit_rate(2) == 0.0
