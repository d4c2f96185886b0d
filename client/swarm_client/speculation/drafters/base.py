"""What a drafter is: told the certain tokens, asked which may follow a hypothetical path, measured by what came true.

Owns the contract between the speculative engine and any source of guesses, and the measuring, which is the same for all
of them. Knows neither the tree the engine grows from the guesses nor the chain that verifies it. A drafter sees token
ids only: hidden states live on the tail.

A drafter is synchronous code for one generation, called from one thread at a time. What it guesses changes the speed
and never the text, so it may be arbitrarily bad, but it may also raise or stall: the engine calls it through
`runner.ThreadedDrafter`, which turns both into `DrafterFailed`. Some of it may be worth hearing before the rest has been
thought out: `glance` says what can be said in no time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from swarm.errors import UsageError
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm_client.speculation.drafters.acceptance import AcceptanceRates

TokenPath = tuple[int, ...]
"""Drafted tokens after the certain ones, from the first level down; `()` asks what follows the certain text itself."""

MAX_REMEMBERED = 4096  # proposals that wait for the truth; an engine holds far fewer nodes


class Candidate(NamedTuple):
    """A token that may come next, and ln of the drafter's belief in it, at most 0."""

    token: int
    logprob: float


class CachedProposal(NamedTuple):
    """What a drafter can say at once. `open`: for each path the belief that only its whole answer would place."""

    candidates: list[list[Candidate]]
    unassigned_mass: list[float]


class Drafter(ABC):
    """Subclasses write `_begin`, `_advance` and `_draft`; the engine calls the public methods.

    `instant`: all of its answers take microseconds. `extend_is_synchronous`: `extend` does.

    Acceptance is measured by itself: a proposal is remembered until the tokens that became certain confirm or refute
    it, at the depth it was made for.
    """

    is_synchronous = False
    extend_is_synchronous = False

    def __init__(self, name: str, acceptance: AcceptanceRates | None = None) -> None:
        """`name`: what statistics call it. `acceptance`: where to go on measuring; a fresh one by default."""
        self.name = name
        self.acceptance = acceptance or AcceptanceRates()
        self._waiting: dict[TokenPath, list[_Proposal]] = {}

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """A new generation, or another text than before: these tokens, and nothing else, are certain."""
        self._waiting.clear()
        self._begin(prompt_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` follow the certain ones and are now certain too."""
        self._judge(tokens)
        self._advance(tokens)

    def set_medusa_candidates(self, hints: MedusaCandidates) -> None:  # noqa: B027, most have no use for it
        """What the tail's own heads think comes after the certain tokens, just after `extend`."""

    def propose(self, path: Sequence[int], width: int) -> list[Candidate]:
        """What follows the certain tokens and then `path`: at most `width` different tokens, likeliest first."""
        return self.propose_many([path], width)[0]

    def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        """`propose` for each of `paths` at once, as for a level of a tree: one list a path, possibly empty."""
        if width < 1:
            raise UsageError(f"a drafter is asked for at least one token, not {width}")
        asked = [tuple(path) for path in paths]
        drafted = self._draft(asked, width)
        for path, candidates in zip(asked, drafted, strict=True):
            self._remember(path, candidates, width)
        return drafted

    def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        """What takes no time of `propose_many`."""
        asked = [tuple(path) for path in paths]
        seen = self._propose_cached(asked, width)
        for path, candidates, still_open in zip(asked, seen.candidates, seen.unassigned_mass, strict=True):
            if candidates or not still_open:
                self._remember(path, candidates, width)
        return seen

    def close(self) -> None:
        """Let go of what it computes with; what it has measured stays. It is asked for nothing more. Idempotent."""
        self._waiting.clear()

    @property
    def model_hit_rate(self) -> float:
        """How often the target's token was among those that the slow part of it, if there is one, proposed."""
        return min(1.0, math.fsum(self.acceptance.table(1)[0]))

    @abstractmethod
    def _begin(self, prompt_ids: Sequence[int]) -> None: ...

    @abstractmethod
    def _advance(self, tokens: Sequence[int]) -> None: ...

    @abstractmethod
    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        """As `propose_many`, `width` >= 1."""

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        if self.is_synchronous:
            return CachedProposal(self._draft(paths, width), [0.0] * len(paths))
        return CachedProposal([[] for _ in paths], [1.0] * len(paths))

    def _remember(self, path: TokenPath, candidates: Sequence[Candidate], width: int) -> None:
        if len(self._waiting) < MAX_REMEMBERED or path in self._waiting:
            made = _Proposal(len(path), width, tuple(token for token, _ in candidates))
            known = [p for p in self._waiting.get(path, ()) if p.depth != made.depth]
            self._waiting[path] = [*known, made]

    def _judge(self, tokens: Sequence[int]) -> None:
        """Confirm or refute the proposals along `tokens`; keep those made for what may follow them."""
        certain = tuple(tokens)
        for length, token in enumerate(certain):
            for proposal in self._waiting.get(certain[:length], ()):
                rank = proposal.tokens.index(token) if token in proposal.tokens else None
                self.acceptance.observe(proposal.depth, rank, proposal.width)
        size = len(certain)
        self._waiting = {path[size:]: made for path, made in self._waiting.items() if path[:size] == certain}


class _Proposal(NamedTuple):
    """`depth`: how many uncertain tokens it was built upon when it was made."""

    depth: int
    width: int
    tokens: TokenPath
