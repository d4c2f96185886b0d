"""Several drafters as one: their candidates mixed by calibrated probabilities.

Owns the mixing and the calibration: a drafter's probabilities are corrected by how often such ones were accepted, as
the text goes on, before they are compared.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from swarm.errors import UsageError
from swarm.ewma import DecayedRatio
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.types import TappedRows, Taps
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter, TokenPath

_BOUNDS = (0.01, 0.03, 0.07, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""Bins of the calibration: probabilities between two of these are corrected together."""
_STRENGTH = 10.0
_DECAY = 0.995


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
        self.members = tuple(members)
        self.is_synchronous = all(member.is_synchronous for member in members)
        self.extend_is_synchronous = all(member.extend_is_synchronous for member in members)
        self._calibration = [ProbabilityCalibrator() for _ in members]
        self._claims: dict[int, list[Candidate]] = {}  # by member, for what follows the committed text

    @property
    def model_hit_rate(self) -> float:
        slow = [member for member in self.members if not member.is_synchronous]
        return max((member.model_hit_rate for member in slow), default=0.0)

    def set_medusa_candidates(self, candidates: MedusaCandidates) -> None:
        for member in self.members:
            member.set_medusa_candidates(candidates)

    @property
    def taps(self) -> Taps | None:
        """Of one member at most."""
        return next((member.taps for member in self.members if member.taps is not None), None)

    def set_taps(self, rows: TappedRows) -> None:
        for member in self.members:
            if member.taps is not None:
                member.set_taps(rows)

    def close(self) -> None:
        super().close()
        for member in self.members:
            member.close()

    def drop_member(self, name: str) -> MixtureDrafter | None:
        """A mixture of the other members, as they are; None if none is left."""
        kept = [(m, c) for m, c in zip(self.members, self._calibration, strict=True) if m.name != name]
        if not kept:
            return None
        rest = MixtureDrafter([member for member, _ in kept], self.name)
        rest.acceptance, rest._calibration = self.acceptance, [calibration for _, calibration in kept]
        return rest

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._claims = {}
        for member in self.members:
            member.reset(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        if tokens:
            for member, claims in self._claims.items():
                self._calibration[member].learn(claims, tokens[0])
        self._claims = {}
        for drafter in self.members:
            drafter.extend(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [mix_candidates(claims, width) for claims in self._calibrated(range(len(self.members)), paths, width)]

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        instant = [i for i, member in enumerate(self.members) if member.is_synchronous]
        mixed = [mix_candidates(claims, width) for claims in self._calibrated(instant, paths, width)]
        if self.is_synchronous:
            return CachedProposal(mixed, [0.0] * len(paths))
        return CachedProposal(mixed, [max(0.0, 1.0 - math.fsum(math.exp(c.logprob) for c in made)) for made in mixed])

    def _calibrated(
        self, members: Sequence[int], paths: Sequence[TokenPath], width: int
    ) -> list[list[list[Candidate]]]:
        """The calibrated candidates of each of `members` for each path: `[path][member]`."""
        proposed = {i: self.members[i].propose_many(paths, width) for i in members}
        if () in paths:
            self._claims |= {i: lists[paths.index(())] for i, lists in proposed.items()}
        return [
            [self._calibration[i].corrected(lists[at]) for i, lists in proposed.items()] for at in range(len(paths))
        ]


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
