"""How many layers a model has, for a reader that does not open it: what the records of its nodes say, as one pure
function.

Anybody makes any number of records, so their majority alone is whatever an attacker wants. What the peers say that the
user named outweighs everybody else: their records are signed by the very keys in their addresses. Where none of these
serves the model, an identity that has paid for a proof of work outweighs any number that have not.

Owns that choice. Knows no keys, clock or network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Voters = Literal["nobody", "model", "named", "proven", "all"]
_WORDS = {
    "nobody": "nobody says how many layers there are",
    "model": "the model itself says so",
    "named": "so say {agreeing} of {voters} peers that were named to join by",
    "proven": "so say {agreeing} of {voters} nodes with a proof of work",
    "all": "so say {agreeing} of {voters} nodes",
}


@dataclass(frozen=True, slots=True)
class DepthClaim:
    """What one live record says."""

    layers: int
    is_named: bool = False  # of a peer that the user named
    is_proven: bool = False  # with a proof of work that was verified


@dataclass(frozen=True, slots=True)
class ModelDepth:
    """`layers`: 0 if nobody says. `decided_by`: whose claims counted, and how many of them agree."""

    layers: int = 0
    decided_by: Voters = "nobody"
    agreeing: int = 0
    voters: int = 0

    @property
    def reason(self) -> str:
        return _WORDS[self.decided_by].format(agreeing=self.agreeing, voters=self.voters)


def model_depth(claims: Collection[DepthClaim], before: ModelDepth = ModelDepth()) -> ModelDepth:
    """What most of the named say; else what they said `before`; else most of the proven, else most of all.

    A tie is decided by all claims, then for the smaller number. O(n).
    """
    named = [claim for claim in claims if claim.is_named]
    if not named and before.decided_by == "named":
        return before
    proven = [claim for claim in claims if claim.is_proven]
    of_all = Counter(claim.layers for claim in claims)
    groups: tuple[tuple[Voters, Collection[DepthClaim]], ...] = (("named", named), ("proven", proven), ("all", claims))
    for name, voters in groups:
        votes = Counter(claim.layers for claim in voters)
        if votes:
            layers = min(votes, key=lambda depth: (-votes[depth], -of_all[depth], depth))
            return ModelDepth(layers, name, votes[layers], len(voters))
    return ModelDepth()
