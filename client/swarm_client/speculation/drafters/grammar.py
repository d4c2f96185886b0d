"""Drafts within a grammar: what it forces, and of another drafter's candidates those that it allows.

Owns how likely the forced tokens are: certain, but for the last ones of a forced text, which the model may spell
otherwise together with what follows. How often it does not is measured. Where the grammar leaves few choices, they
share what the other drafter leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from swarm.ewma import DecayedRatio
from swarm_client.speculation.drafters.base import (
    MAX_REMEMBERED,
    CachedProposal,
    Candidate,
    Drafter,
    TokenPath,
    WrappingDrafter,
)
from swarm_kernels.sampling.grammar import GrammarState, TokenMask

MAX_CHOICES = 64  # more allowed tokens than these are no choice but a text
_CHOICE_MASS = 0.8  # of what the other drafter leaves; the rest are spellings that are rare
_DECAY = 0.99
_PRIOR = 20.0  # tokens
_PRIOR_CANONICAL = 0.8


class _Known(NamedTuple):
    """What the grammar says of one path: the candidates that it determines, or else the mask of what it allows."""

    candidates: list[Candidate]
    mask: TokenMask | None = None


class GrammarDrafter(WrappingDrafter):
    """Wraps the drafter of one generation. `reset` compiles the grammar, unless it is compiled.

    What a hostile grammar forces may take a second, so that only `extend` is for the event loop.
    """

    cached_is_synchronous = False

    def __init__(self, inner: Drafter, compile_grammar: Callable[[], GrammarState]) -> None:
        """`compile_grammar`: raises InvalidRequest."""
        super().__init__(f"{inner.name} + grammar", inner)
        self._compile_grammar = compile_grammar
        self._state: GrammarState | None = None
        self._answer: list[int] = []
        self._canonical = DecayedRatio(_PRIOR * _PRIOR_CANONICAL, _PRIOR)
        self._claims: dict[TokenPath, int] = {}  # forced tokens with several spellings

    @property
    def model_hit_rate(self) -> float:
        return self._inner.model_hit_rate

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._inner.reset(prompt_ids)
        self._answer, self._claims = [], {}
        self._state = self._state or self._compile_grammar()

    def _advance(self, tokens: Sequence[int]) -> None:
        self._inner.extend(tokens)
        committed = tuple(tokens)
        for end, token in enumerate(committed):
            if committed[:end] in self._claims:
                self._canonical.add(token == self._claims[committed[:end]], 1.0, _DECAY)
        size = len(committed)
        self._claims = {path[size:]: made for path, made in self._claims.items() if path[:size] == committed}
        self._answer += committed

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        known = [self._know(path) for path in paths]
        free = [path for path, made in zip(paths, known, strict=True) if made.mask is not None]
        drafted = iter(self._inner.propose_many(free, width) if free else ())
        return [made.candidates if made.mask is None else self._within(made, next(drafted), width)[0] for made in known]

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        known = [self._know(path) for path in paths]
        free = [path for path, made in zip(paths, known, strict=True) if made.mask is not None]
        cached = self._inner.propose_cached(free, width) if free else CachedProposal([], [])
        drafted = iter(zip(cached.candidates, cached.unassigned_mass, strict=True))
        candidates, masses = [], []
        for made in known:
            if made.mask is None:
                candidates.append(made.candidates)
                masses.append(0.0)
                continue
            proposed, unassigned = next(drafted)
            within, scale = self._within(made, proposed, width, unassigned)
            candidates.append(within)
            masses.append(min(1.0, unassigned * scale))
        return CachedProposal(candidates, masses)

    def _know(self, path: TokenPath) -> _Known:
        assert self._state is not None  # `reset` comes first
        mask = self._state.masks(self._answer, [path])[0]
        if mask is None:
            return _Known([])
        allowed = np.flatnonzero(mask)
        if len(allowed) == 1:
            return _Known([Candidate(int(allowed[0]), 0.0)])
        forced = self._state.forced(self._answer, path)
        several = not forced.settled and self._choices(mask)  # the text after the forced one, spelled with it
        if several or not forced.tokens or not mask[forced.tokens[0]]:
            return _Known([], mask)
        if len(self._claims) < MAX_REMEMBERED:
            self._claims[path] = forced.tokens[0]
        return _Known([Candidate(forced.tokens[0], math.log(min(1.0, max(0.01, self._canonical.value))))])

    def _within(
        self, made: _Known, proposed: Sequence[Candidate], width: int, unassigned: float = 0.0
    ) -> tuple[list[Candidate], float]:
        """The candidates that the mask allows, and by what their probabilities grew: the forbidden ones have none."""
        mask = made.mask
        assert mask is not None  # or the grammar has said it all
        kept = [candidate for candidate in proposed if candidate.token < len(mask) and mask[candidate.token]]
        forbidden = math.fsum(math.exp(c.logprob) for c in proposed) - math.fsum(math.exp(c.logprob) for c in kept)
        scale = 1.0 / max(1e-6, 1.0 - forbidden)
        probs = {c.token: min(1.0, math.exp(c.logprob) * scale) for c in kept}
        left = 1.0 - math.fsum(probs.values()) - unassigned * scale
        choices = self._choices(mask)
        if left > 0 and choices:
            for token in choices:
                probs[token] = probs.get(token, 0.0) + _CHOICE_MASS * left / len(choices)
        ranked = sorted(probs.items(), key=lambda item: -item[1])[:width]
        return [Candidate(token, math.log(min(1.0, prob))) for token, prob in ranked if prob > 0], scale

    def _choices(self, mask: TokenMask) -> list[int]:
        """The tokens to choose from where they are few, without those that only begin another one."""
        assert self._state is not None  # `reset` comes first
        allowed = np.flatnonzero(mask).tolist()
        if len(allowed) > MAX_CHOICES:
            return []
        spelled = {token: self._state.spelling(token) for token in allowed}
        return [
            t
            for t, text in spelled.items()
            if not any(other.startswith(text) for o, other in spelled.items() if o != t)
        ]
