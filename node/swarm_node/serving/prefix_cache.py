"""Which sessions of a span begin like which texts, so that what was computed once is shared and not computed again.

Owns the names of beginnings and which ended sessions are kept for them. The pages are the engine's. A client finds only
its own sessions: what a hop computed depends on the rows it was sent, and nobody can answer for a stranger's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.types import LayerSpan, PeerId

KEPT_SHARE = 0.25  # of the cache, at most, for sessions that have ended
KEPT_A_PEER = 16

_Name = tuple[PeerId, LayerSpan, bytes]


@dataclass(slots=True)
class _Entry:
    owner: PeerId
    span: LayerSpan
    tokens: int | None = None  # how many an ended session keeps; None while it lives
    names: list[_Name] = field(default_factory=list)


class PrefixCache:
    """Of one loaded span. `computed` tells how many tokens a living session has behind it."""

    def __init__(self, capacity_tokens: int, computed: Callable[[int], int]) -> None:
        self._room = int(KEPT_SHARE * capacity_tokens)
        self._computed = computed
        self._entries: dict[int, _Entry] = {}
        self._keys: dict[_Name, int] = {}  # the latest session that begins so
        self._kept: dict[int, int] = {}  # ended sessions and their tokens, oldest first

    def find(self, owner: PeerId, span: LayerSpan, digests: Sequence[bytes]) -> tuple[int, int]:
        """The session that shares the longest beginning, and how many tokens; (-1, 0) if none does."""
        for count in range(len(digests), 0, -1):
            key = self._keys.get((owner, span, digests[count - 1]))
            if key is not None and self._tokens(key) >= count * HASH_BLOCK_TOKENS:
                if key in self._kept:
                    self._kept[key] = self._kept.pop(key)  # used last
                return key, count * HASH_BLOCK_TOKENS
        return -1, 0

    def add(self, key: int, owner: PeerId, span: LayerSpan, digests: Sequence[bytes]) -> None:
        """A session that lives now and will begin so."""
        self._entries[key] = _Entry(owner, span)
        self._name(key, digests)

    def retain(self, key: int, digests: Sequence[bytes]) -> tuple[int, list[int]]:
        """A session has ended. -> (how many of its tokens to keep, 0 for none; ended sessions that must go for it)."""
        entry = self._entries[key]
        self._name(key, digests)
        tokens = min(self._computed(key), len(digests) * HASH_BLOCK_TOKENS) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
        if not 0 < tokens <= self._room:
            return 0, []
        going: list[int] = []
        own = [k for k in self._kept if self._entries[k].owner == entry.owner]
        if len(own) >= KEPT_A_PEER:
            going.append(own[0])
        total = sum(self._kept.values()) - sum(self._kept[k] for k in going)
        for old in self._kept:
            if total + tokens <= self._room:
                break
            if old not in going:
                going.append(old)
                total -= self._kept[old]
        entry.tokens = self._kept[key] = tokens
        return tokens, going

    def evict_candidate(self) -> int | None:
        """The ended session whose room is wanted first."""
        return next(iter(self._kept), None)

    def of(self, owner: PeerId) -> list[int]:
        """The ended sessions of a client."""
        return [key for key in self._kept if self._entries[key].owner == owner]

    def forget(self, key: int) -> None:
        """Idempotent."""
        self._kept.pop(key, None)
        entry = self._entries.pop(key, None)
        for name in entry.names if entry else ():
            if self._keys.get(name) == key:
                del self._keys[name]

    def _name(self, key: int, digests: Sequence[bytes]) -> None:
        entry = self._entries[key]
        for digest in digests[len(entry.names) :]:
            name = (entry.owner, entry.span, digest)
            entry.names.append(name)
            self._keys[name] = key

    def _tokens(self, key: int) -> int:
        kept = self._entries[key].tokens
        return self._computed(key) if kept is None else kept
