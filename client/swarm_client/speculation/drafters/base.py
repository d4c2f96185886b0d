"""The drafter interface: extended by committed tokens, queried for candidates after a draft path, scored by acceptance.

Owns the contract between speculative decoding and any source of draft tokens, and the measuring of acceptance, which is
the same for all of them. Knows neither the draft tree nor the chain that verifies it. A drafter sees token ids, and if
it names `taps`, hidden states of the text that the hops send.

A drafter is synchronous code for one generation, called from one thread at a time. Its drafts change the speed and
never the text, so they may be arbitrarily bad, but it may also raise or stall: it is called through `ThreadedDrafter`,
which turns both into `DrafterFailed`. `propose_cached` returns what takes no draft-model call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from swarm.errors import UsageError
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.tap_messages import DraftedChildren
from swarm.types import TappedRows, Taps
from swarm_client.speculation.drafters.acceptance import AcceptanceRates

TokenPath = tuple[int, ...]
"""Draft tokens after the committed ones, from the first level down; `()` is the end of the committed text."""

NO_TAPS: TappedRows = {}
MAX_REMEMBERED = 4096  # proposals not verified yet; a draft tree has far fewer nodes


class Candidate(NamedTuple):
    """A token that may come next, and ln of the drafter's probability for it, at most 0."""

    token: int
    logprob: float


class CachedProposal(NamedTuple):
    """What takes no draft-model call. `unassigned_mass`: for each path the probability left to such a call."""

    candidates: list[list[Candidate]]
    unassigned_mass: list[float]


class Drafter(ABC):
    """Subclasses write `_begin`, `_advance` and `_draft`; the engine calls the public methods.

    `is_synchronous`: all of its calls take microseconds. `extend_is_synchronous`, `cached_is_synchronous`: `extend` or
    `propose_cached` does.

    Acceptance is measured here: a proposal is remembered until committed tokens accept or reject it, at the depth it
    was made for.
    """

    is_synchronous = False
    extend_is_synchronous = False
    cached_is_synchronous = True

    def __init__(self, name: str, acceptance: AcceptanceRates | None = None) -> None:
        """`name`: what statistics call it. `acceptance`: where to go on measuring; a fresh one by default."""
        self.name = name
        self.acceptance = acceptance or AcceptanceRates()
        self._waiting: dict[TokenPath, list[_Proposal]] = {}

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """A new generation, or another text than before: exactly these tokens are committed."""
        self._waiting.clear()
        self._begin(prompt_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` follow the committed ones and are now committed too."""
        self._score(tokens)
        self._advance(tokens)

    def set_medusa_candidates(self, candidates: MedusaCandidates) -> None:  # noqa: B027, most have no use for it
        """Candidates of the tail's Medusa heads after the committed tokens; called just after `extend`."""

    def set_tail_draft(self, children: DraftedChildren) -> None:  # noqa: B027, likewise
        """What the tail's drafter says may follow the committed tokens; called just after `extend`."""

    @property
    def taps(self) -> Taps | None:
        """The hidden states that it reads, if any."""
        return None

    def tree_ms(self) -> float:
        """What a whole tree takes here, measured before a generation; 0 for one that needs no model."""
        return 0.0

    def set_taps(self, rows: TappedRows) -> None:  # noqa: B027, likewise
        """Hidden states of the text that have come; called just before `extend`. Some may never come."""

    def propose(self, path: Sequence[int], width: int) -> list[Candidate]:
        """What follows the committed tokens and then `path`: at most `width` different tokens, likeliest first."""
        return self.propose_many([path], width)[0]

    def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        """`propose` for each of `paths` at once, as for a level of a tree: one list a path, possibly empty."""
        if width < 1:
            raise UsageError(f"a drafter proposes at least one token, not {width}")
        queried = [tuple(path) for path in paths]
        drafted = self._draft(queried, width)
        for path, candidates in zip(queried, drafted, strict=True):
            self._remember(path, candidates, width)
        return drafted

    def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        """What `propose_many` returns without a draft-model call."""
        queried = [tuple(path) for path in paths]
        cached = self._propose_cached(queried, width)
        for path, candidates, unassigned in zip(queried, cached.candidates, cached.unassigned_mass, strict=True):
            if candidates or not unassigned:
                self._remember(path, candidates, width)
        return cached

    def close(self) -> None:
        """Free what it computes with; what it has measured stays. It is not called again. Idempotent."""
        self._waiting.clear()

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each drafter within this one that has failed and is left out."""
        return ()

    @property
    def model_hit_rate(self) -> float:
        """How often the target's token was among the candidates of the draft model, if there is one."""
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

    def _score(self, tokens: Sequence[int]) -> None:
        """Accept or reject the proposals along `tokens`; keep those made for what may follow them."""
        committed = tuple(tokens)
        for length, token in enumerate(committed):
            for proposal in self._waiting.get(committed[:length], ()):
                rank = proposal.tokens.index(token) if token in proposal.tokens else None
                self.acceptance.observe(proposal.depth, rank, proposal.width)
        size = len(committed)
        self._waiting = {path[size:]: made for path, made in self._waiting.items() if path[:size] == committed}


class _Proposal(NamedTuple):
    """`depth`: how many draft tokens it was built upon when it was made."""

    depth: int
    width: int
    tokens: TokenPath


class WrappingDrafter(Drafter):
    """Changes what the drafter of one generation says; all else is handed on to it."""

    def __init__(self, name: str, inner: Drafter) -> None:
        super().__init__(name)
        self._inner = inner
        self.extend_is_synchronous = inner.extend_is_synchronous

    @property
    def failures(self) -> tuple[str, ...]:
        return self._inner.failures

    def set_medusa_candidates(self, candidates: MedusaCandidates) -> None:
        self._inner.set_medusa_candidates(candidates)

    def set_tail_draft(self, children: DraftedChildren) -> None:
        self._inner.set_tail_draft(children)

    @property
    def taps(self) -> Taps | None:
        return self._inner.taps

    def set_taps(self, rows: TappedRows) -> None:
        self._inner.set_taps(rows)

    def close(self) -> None:
        super().close()
        self._inner.close()
