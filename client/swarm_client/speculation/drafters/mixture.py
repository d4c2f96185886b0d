"""Several drafters as one: their candidates merged by how far each is to be believed.

Owns the merging. A drafter's probabilities are its own claim; what counts is how often claims like that came true, so
each drafter's are calibrated as the text goes on before they are compared.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from swarm.errors import UsageError
from swarm.ewma import DecayedRatio
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter, TokenPath

_BOUNDS = (0.01, 0.03, 0.07, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""Claims between two of these are calibrated together."""
_STRENGTH = 10.0
_DECAY = 0.995


class MixtureDrafter(Drafter):
    """Members are asked in order: the look-up first, and what belief it does not claim goes to the next.

    So a long match, which comes true nine times in ten, stands first by itself, and where nothing matches a model says
    it all. It is how partial matching hands down its escapes. Each member keeps its own acceptance.
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
        self._claims: dict[int, list[Candidate]] = {}  # by member, about what follows the certain text

    @property
    def model_hit_rate(self) -> float:
        slow = [member for member in self.members if not member.is_synchronous]
        return max((member.model_hit_rate for member in slow), default=0.0)

    def set_medusa_candidates(self, hints: MedusaCandidates) -> None:
        for member in self.members:
            member.set_medusa_candidates(hints)

    def close(self) -> None:
        super().close()
        for member in self.members:
            member.close()

    def drop_member(self, name: str) -> MixtureDrafter | None:
        """The others, as they are, if one has failed; None if nobody is left."""
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
        return [mix_candidates(claims, width) for claims in self._learn_from(range(len(self.members)), paths, width)]

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        instant = [i for i, member in enumerate(self.members) if member.is_synchronous]
        heard = [mix_candidates(claims, width) for claims in self._learn_from(instant, paths, width)]
        if self.is_synchronous:
            return CachedProposal(heard, [0.0] * len(paths))
        return CachedProposal(heard, [max(0.0, 1.0 - math.fsum(math.exp(c.logprob) for c in made)) for made in heard])

    def _learn_from(
        self, members: Sequence[int], paths: Sequence[TokenPath], width: int
    ) -> list[list[list[Candidate]]]:
        """What each of `members` says to each path, corrected: `[path][member]`."""
        proposed = {i: self.members[i].propose_many(paths, width) for i in members}
        if () in paths:
            self._claims |= {i: lists[paths.index(())] for i, lists in proposed.items()}
        return [
            [self._calibration[i].corrected(lists[at]) for i, lists in proposed.items()] for at in range(len(paths))
        ]


class ProbabilityCalibrator:
    """What a drafter's claims are worth: per range of claimed probability, how often the token came.

    Starts from taking every claim at its word.
    """

    def __init__(self) -> None:
        self._hits = [DecayedRatio() for _ in range(len(_BOUNDS) + 1)]  # tokens that came over those claimed

    def learn(self, claims: Sequence[Candidate], token: int) -> None:
        """`token` came where `claims` were made."""
        for candidate in claims:
            p = math.exp(candidate.logprob)
            self._hits[bisect.bisect_right(_BOUNDS, p)].add(candidate.token == token, p, _DECAY)

    def corrected(self, claims: Sequence[Candidate]) -> list[Candidate]:
        """The same candidates with what they are worth, likeliest first; together at most certain."""
        beliefs = [(claim.token, self._worth(math.exp(claim.logprob))) for claim in claims]
        total = max(1.0, math.fsum(belief for _, belief in beliefs))
        ranked = sorted(beliefs, key=lambda item: -item[1])
        return [Candidate(token, math.log(belief / total)) for token, belief in ranked]

    def _worth(self, p: float) -> float:
        hits = self._hits[bisect.bisect_right(_BOUNDS, p)]
        expected = hits.denominator + _STRENGTH * p
        factor = (hits.numerator + _STRENGTH * p) / max(expected, 1e-12)
        return min(1.0, max(1e-9, p * factor))


def mix_candidates(proposals: Sequence[Sequence[Candidate]], width: int) -> list[Candidate]:
    """One list of at most `width`, likeliest first: each list shares out what belief those before it left over."""
    beliefs: dict[int, float] = {}
    left = 1.0
    for candidates in proposals:
        total = math.fsum(math.exp(logprob) for _, logprob in candidates)
        share = left / max(1.0, total)
        for token, logprob in candidates:
            beliefs[token] = beliefs.get(token, 0.0) + share * math.exp(logprob)
        left *= max(0.0, 1.0 - total)
    ranked = sorted(((t, belief) for t, belief in beliefs.items() if belief > 0), key=lambda item: -item[1])[:width]
    return [Candidate(token, min(0.0, math.log(belief))) for token, belief in ranked]
