"""N-gram (prompt-lookup) drafter: proposes what followed the same tokens before, in prompt and answer. No model.

Owns how matches become probabilities: a match gets as much probability as matches of its length have been right, and
the rest goes to its shorter suffixes (prediction by partial matching, Cleary & Witten 1984, with escapes estimated as
by Bloom's PPMZ). Knows nothing of languages: any vocabulary will do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from swarm.ewma import DecayedRatio
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.suffix_automaton import Follower, Match, SuffixAutomaton

MAX_SUFFIXES = 6  # that divide the probability mass
MIN_PROB = 1e-4
_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 22)  # a match belongs to the last of these that it reaches
_PRIOR_STRENGTH = 12.0
_DECAY = 0.995
_PRIOR_UNIQUE = (0.27, 0.52, 0.63, 0.72, 0.82, 0.88, 0.93, 0.97)
_PRIOR_AMBIGUOUS = (0.32, 0.43, 0.50, 0.53, 0.58, 0.68, 0.82, 0.93)
"""By length: how often the next token is one that followed before, where that was always the same one, or several. As
measured on 150 chats that SmolLM2-135M wrote; only the prior, for both are measured as the text goes on."""


class NgramDrafter(Drafter):
    """Prompt lookup in a suffix automaton; a token costs microseconds."""

    is_synchronous = extend_is_synchronous = True

    def __init__(self, name: str = "ngram") -> None:
        super().__init__(name)
        self._begin(())

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._automaton = SuffixAutomaton()
        self._accuracy = _MatchAccuracy()
        self._walked: dict[TokenPath, Match] = {}
        self._advance(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._accuracy.learn(self._automaton.suffixes(self._automaton.match), token)
            self._automaton.append(token)
        self._walked = {(): self._automaton.match}

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [self._after(self._walk(path), width) for path in paths]

    def _walk(self, path: TokenPath) -> Match:
        """The match at the end of `path`; walked from the longest prefix that was walked before."""
        known = len(path)
        while path[:known] not in self._walked:
            known -= 1
        match = self._walked[path[:known]]
        for end in range(known, len(path)):
            match = self._walked[path[: end + 1]] = self._automaton.step(match, path[end])
        return match

    def _after(self, match: Match, width: int) -> list[Candidate]:
        probs: dict[int, float] = {}
        left = 1.0
        for number, (length, followers) in enumerate(self._automaton.suffixes(match)):
            fresh = {t: f for t, f in followers.items() if t not in probs}
            if number == MAX_SUFFIXES or left < MIN_PROB:
                break
            if not fresh:
                continue
            share = left * self._accuracy.of(length, len(followers))
            weights = _weights(fresh)
            total = math.fsum(weights.values())
            for token, weight in weights.items():
                probs[token] = share * weight / total
            left -= share
        ranked = sorted(probs.items(), key=lambda item: -item[1])[:width]
        return [Candidate(token, math.log(prob)) for token, prob in ranked]


def _weights(followers: dict[int, Follower]) -> dict[int, float]:
    """How often each came, the latest once more: recent repetitions recur."""
    latest = max(follower.latest for follower in followers.values())
    return {t: f.count + (1.0 if f.latest == latest else 0.0) for t, f in followers.items()}


class _MatchAccuracy:
    """How often the next token was among the followers of a match, by its length and whether they were several."""

    def __init__(self) -> None:
        expected = (_PRIOR_UNIQUE, _PRIOR_AMBIGUOUS)
        self._hits = [[DecayedRatio(p * _PRIOR_STRENGTH, _PRIOR_STRENGTH) for p in row] for row in expected]

    def of(self, length: int, followers: int) -> float:
        return self._hits[followers > 1][_column(length)].value

    def learn(self, suffixes: Iterable[tuple[int, dict[int, Follower]]], token: int) -> None:
        """`token` came where the text ended with `suffixes`, longest first."""
        for number, (length, followers) in enumerate(suffixes):
            if number == MAX_SUFFIXES:
                return
            hit = token in followers
            self._hits[len(followers) > 1][_column(length)].add(hit, 1.0, _DECAY)
            if hit:
                return  # shorter suffixes count only when the longer ones have failed


def _column(length: int) -> int:
    column = len(_LENGTHS) - 1
    while _LENGTHS[column] > length:
        column -= 1
    return column
