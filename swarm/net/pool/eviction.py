"""Which connection makes way when there is no room for another, as one pure function.

Owns that choice. A connection that is in use (a session runs over it) never goes. Among the others, those of peers that
have never used this node go first, from the address block that has most of them, the oldest first: somebody who opens
connections in bulk pushes out his own, and a newcomer has a few seconds to open a session. Peers that have used this
node before go next, then idle connections that we dialed ourselves.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_L = TypeVar("_L")


class LinkUse(enum.IntEnum):
    """In the order in which connections go."""

    STRANGER = 0  # accepted, and its peer has had no session here
    FORMER = 1  # its peer has had one
    DIALED = 2  # by us, and idle
    IN_USE = 3


@dataclass(frozen=True, slots=True)
class LinkFacts(Generic[_L]):
    """`since`: when it was opened, or last used."""

    link: _L
    block: str
    use: LinkUse
    since: float


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Accepted connections that are not in use: newcomers, and clients who come back, against 0.3 MB for each."""

    max_idle: int = 128
    max_idle_per_block: int = 32


class NoRoom:
    """All connections are in use."""


NO_ROOM = NoRoom()


def victim(
    links: Sequence[LinkFacts[_L]],
    newcomer_block: str | None,
    max_links: int,
    policy: EvictionPolicy = EvictionPolicy(),
) -> _L | NoRoom | None:
    """The link to close for one more; None if there is room. `newcomer_block`: of an idle one; None for others."""
    idle = [facts for facts in links if facts.use <= LinkUse.FORMER]
    if newcomer_block is not None:
        same = [facts for facts in idle if facts.block == newcomer_block]
        if len(same) >= policy.max_idle_per_block:
            return _first(same)
        if len(idle) >= policy.max_idle:
            return _first(idle)
    if len(links) < max_links:
        return None
    if idle := idle or [facts for facts in links if facts.use is LinkUse.DIALED]:
        return _first(idle)
    return NO_ROOM


def _first(idle: Sequence[LinkFacts[_L]]) -> _L:
    """Of those of the lowest use, the oldest one of the block that has most."""
    lowest = min(facts.use for facts in idle)
    idle = [facts for facts in idle if facts.use is lowest]
    counts = Counter(facts.block for facts in idle)
    largest = max(counts, key=lambda block: (counts[block], block))
    return min((facts for facts in idle if facts.block == largest), key=lambda facts: facts.since).link
