"""A suffix automaton that grows by one token at a time and remembers what followed every run of tokens.

Owns the structure (Blumer et al., "The smallest automaton recognizing the subwords of a text", TCS 1985) and the counts
of followers. Knows neither probabilities nor drafts. A state stands for runs of tokens that occur at the same places;
its link is the longest shorter run, a suffix of them, that occurs at more places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

START = 0
"""The state of the empty run."""

MAX_COUNTED = 8
"""Suffixes whose followers are counted for each token, longest first: the counting's cost a token is bounded."""


@dataclass(slots=True)
class Follower:
    """A token that came after a run. `count`: how often it was seen to; `latest`: the last place it did."""

    state: int
    count: int
    latest: int


@dataclass(frozen=True, slots=True)
class Match:
    """A suffix of some text that occurred before: its state, and how many tokens of the text it is."""

    state: int = START
    length: int = 0


class SuffixAutomaton:
    """Appending a token costs O(1) amortized and at most 2 states. Indices of states stay valid."""

    def __init__(self) -> None:
        self.size = 0  # tokens
        self._followers: list[dict[int, Follower]] = [{}]
        self._link = [-1]
        self._longest = [0]
        self._last = START

    def __len__(self) -> int:
        """States."""
        return len(self._link)

    @property
    def match(self) -> Match:
        """The longest suffix of the text that occurred before its end."""
        state = self._link[self._last]
        return Match(state, self._longest[state]) if state > START else Match()

    def append(self, token: int) -> None:
        followers, link, longest = self._followers, self._link, self._longest
        place, self.size = self.size, self.size + 1
        fresh = self._add({}, longest[self._last] + 1, START)
        state = self._last
        self._last = fresh
        while state != -1 and token not in followers[state]:
            followers[state][token] = Follower(fresh, 1, place)
            state = link[state]
        if state == -1:
            return
        target = followers[state][token].state
        if longest[target] == longest[state] + 1:
            link[fresh] = target
        else:
            link[fresh] = link[target] = self._split(target, state, token)
        for _ in range(MAX_COUNTED):
            if state == -1:
                return
            seen = followers[state][token]
            seen.count += 1
            seen.latest = place
            state = link[state]

    def step(self, match: Match, token: int) -> Match:
        """The longest suffix of (a text that ends with `match`, then `token`) that occurred."""
        state, length = match.state, match.length
        while state != START and token not in self._followers[state]:
            state = self._link[state]
            length = self._longest[state]
        found = self._followers[state].get(token)
        return Match(found.state, length + 1) if found is not None else Match()

    def suffixes(self, match: Match) -> Iterator[tuple[int, dict[int, Follower]]]:
        """(length, followers by token) of `match` and its shorter suffixes that occur at more places, to length 1."""
        state, length = match.state, match.length
        while state > START:
            yield length, self._followers[state]
            state = self._link[state]
            length = self._longest[state]

    def _split(self, target: int, state: int, token: int) -> int:
        """A state for the shorter runs of `target`, which from now on occur at more places than the longer ones."""
        copied = {t: Follower(f.state, f.count, f.latest) for t, f in self._followers[target].items()}
        clone = self._add(copied, self._longest[state] + 1, self._link[target])
        while state != -1:
            seen = self._followers[state].get(token)
            if seen is None or seen.state != target:
                break
            seen.state = clone
            state = self._link[state]
        return clone

    def _add(self, followers: dict[int, Follower], longest: int, link: int) -> int:
        self._followers.append(followers)
        self._longest.append(longest)
        self._link.append(link)
        return len(self._link) - 1
