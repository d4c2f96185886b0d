"""Several drafters as one: their candidates mixed by calibrated probabilities.

Owns the mixing and the calibration: a drafter's probabilities are corrected by how often such ones were accepted, as
the text goes on, before they are compared. And that a member which raises is left alone: the others go on.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from swarm.errors import DrafterFailed, UsageError
from swarm.ewma import DecayedRatio
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.tap_messages import DraftedChildren
from swarm.types import TappedRows, Taps
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter, TokenPath

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_BOUNDS = (0.01, 0.03, 0.07, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""Bins of the calibration: probabilities between two of these are corrected together."""
_STRENGTH = 10.0
_DECAY = 0.995


@dataclass(slots=True, eq=False)
class _Member:
    """`claims`: what it proposed for the place after the committed text."""

    drafter: Drafter
    calibration: ProbabilityCalibrator
    claims: list[Candidate] = field(default_factory=list)


class MixtureDrafter(Drafter):
    """Members come in order: the n-gram drafter first, and the probability mass that it leaves goes to the next.

    So a long match, which is accepted nine times in ten, ranks first, and where nothing matches the model has all the
    mass, as with the escapes of prediction by partial matching. Each member keeps its own acceptance.
    """

    def __init__(self, members: Sequence[Drafter], name: str = "combined") -> None:
        """Raises UsageError without members, or if two have one name."""
        super().__init__(name)
        if not members or len({member.name for member in members}) < len(members):
            raise UsageError("a combination needs drafters with different names")
        self._members = [_Member(member, ProbabilityCalibrator()) for member in members]
        self._failures: list[str] = []
        self.extend_is_synchronous = all(member.extend_is_synchronous for member in members)
        self._note_synchronous()

    @property
    def members(self) -> tuple[Drafter, ...]:
        """Those that have not failed."""
        return tuple(member.drafter for member in self._members)

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(self._failures)

    @property
    def model_hit_rate(self) -> float:
        slow = [member for member in self.members if not member.is_synchronous]
        return max((member.model_hit_rate for member in slow), default=0.0)

    def set_medusa_candidates(self, candidates: MedusaCandidates) -> None:
        self._each(lambda member: member.set_medusa_candidates(candidates))

    def set_tail_draft(self, children: DraftedChildren) -> None:
        self._each(lambda member: member.set_tail_draft(children))

    @property
    def taps(self) -> Taps | None:
        """Of one member at most."""
        return next((member.taps for member in self.members if member.taps is not None), None)

    def set_taps(self, rows: TappedRows) -> None:
        self._each(lambda member: member.set_taps(rows) if member.taps is not None else None)

    def close(self) -> None:
        super().close()
        for member in self.members:
            member.close()

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        for member in self._members:
            member.claims = []
        self._each(lambda drafter: drafter.reset(prompt_ids))

    def _advance(self, tokens: Sequence[int]) -> None:
        for member in self._members:
            if tokens:
                member.calibration.learn(member.claims, tokens[0])
            member.claims = []
        self._each(lambda drafter: drafter.extend(tokens))

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        proposed = self._each(lambda drafter: drafter.propose_many(paths, width))
        return self._mixed([(member, lists, None) for member, lists in proposed], paths, width)

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        """Mass is left where a member has more to say, for which it must be called."""
        cached = self._each(lambda drafter: drafter.propose_cached(paths, width))
        more = [any(made.unassigned_mass[at] for _, made in cached) for at in range(len(paths))]
        mixed = self._mixed([(member, made.candidates, made.unassigned_mass) for member, made in cached], paths, width)
        left = [max(0.0, 1.0 - math.fsum(math.exp(c.logprob) for c in made)) for made in mixed]
        return CachedProposal(mixed, [mass if asks else 0.0 for mass, asks in zip(left, more, strict=True)])

    def _mixed(
        self,
        proposed: Sequence[tuple[_Member, list[list[Candidate]], list[float] | None]],
        paths: Sequence[TokenPath],
        width: int,
    ) -> list[list[Candidate]]:
        """`proposed`: what members say of each path, and what they leave open. Remembers their claims for the next
        place, but for a member that has not been called."""
        if () in paths:
            at = paths.index(())
            for member, lists, open_mass in proposed:
                if lists[at] or not (open_mass and open_mass[at]):
                    member.claims = lists[at]
        return [
            mix_candidates([member.calibration.corrected(lists[at]) for member, lists, _ in proposed], width)
            for at in range(len(paths))
        ]

    def _each(self, call: Callable[[Drafter], _T]) -> list[tuple[_Member, _T]]:
        """Of every member that does not fail. Raises what the last one raises."""
        results = []
        for member in tuple(self._members):
            try:
                results.append((member, call(member.drafter)))
            except Exception as error:  # anybody's code, whose failure costs its own drafts alone
                if len(self._members) == 1:
                    raise
                self._drop(member, error)
        return results

    def _drop(self, member: _Member, error: Exception) -> None:
        self._members.remove(member)
        why = error if isinstance(error, DrafterFailed) else f"it raised {type(error).__name__}: {error}"
        others = ", ".join(other.name for other in self.members)
        self._failures.append(f"going on without the drafter '{member.drafter.name}', with {others} alone: {why}")
        logger.warning("%s", self._failures[-1])
        with suppress(Exception):
            member.drafter.close()
        self._note_synchronous()

    def _note_synchronous(self) -> None:
        self.is_synchronous = all(member.is_synchronous for member in self.members)


class ProbabilityCalibrator:
    """Per bin of a drafter's probabilities, how often the token came over how often it was expected.

    Starts without any correction.
    """

    def __init__(self) -> None:
        self._hits = [DecayedRatio() for _ in range(len(_BOUNDS) + 1)]  # accepted over expected tokens

    def learn(self, claims: Sequence[Candidate], token: int) -> None:
        """`token` came where `claims` were proposed."""
        for candidate in claims:
            p = math.exp(candidate.logprob)
            self._hits[bisect.bisect_right(_BOUNDS, p)].add(candidate.token == token, p, _DECAY)

    def corrected(self, claims: Sequence[Candidate]) -> list[Candidate]:
        """The same candidates with calibrated probabilities, likeliest first; their sum is at most 1."""
        probs = [(claim.token, self._calibrated_prob(math.exp(claim.logprob))) for claim in claims]
        total = max(1.0, math.fsum(prob for _, prob in probs))
        ranked = sorted(probs, key=lambda item: -item[1])
        return [Candidate(token, math.log(prob / total)) for token, prob in ranked]

    def _calibrated_prob(self, p: float) -> float:
        hits = self._hits[bisect.bisect_right(_BOUNDS, p)]
        expected = hits.denominator + _STRENGTH * p
        factor = (hits.numerator + _STRENGTH * p) / max(expected, 1e-12)
        return min(1.0, max(1e-9, p * factor))


def mix_candidates(proposals: Sequence[Sequence[Candidate]], width: int) -> list[Candidate]:
    """One list of at most `width`, likeliest first: each list divides the mass that those before it left."""
    probs: dict[int, float] = {}
    left = 1.0
    for candidates in proposals:
        total = math.fsum(math.exp(logprob) for _, logprob in candidates)
        share = left / max(1.0, total)
        for token, logprob in candidates:
            probs[token] = probs.get(token, 0.0) + share * math.exp(logprob)
        left *= max(0.0, 1.0 - total)
    ranked = sorted(((t, prob) for t, prob in probs.items() if prob > 0), key=lambda item: -item[1])[:width]
    return [Candidate(token, min(0.0, math.log(prob))) for token, prob in ranked]
