"""The prefix cache of a span: finds a session whose KV cache starts with the same token blocks, to fork it.

Owns the block hashes and which ended sessions are retained for them (LRU). The KV blocks belong to the engine. A client
finds only its own sessions: what a hop computed depends on the rows it was sent, and those of others are untrusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.types import LayerSpan, PeerId
from swarm_hop.serving.policy import PrefixCachePolicy

_PrefixKey = tuple[PeerId, LayerSpan, bytes]


@dataclass(slots=True)
class _Entry:
    owner: PeerId
    span: LayerSpan
    tokens: int | None = None  # retained of an ended session; None while it is live
    prefixes: list[_PrefixKey] = field(default_factory=list)


class PrefixCache:
    """Of one loaded span. `computed(key)`: how many tokens of a live session are in the KV cache."""

    def __init__(
        self, capacity_tokens: int, computed: Callable[[int], int], policy: PrefixCachePolicy = PrefixCachePolicy()
    ) -> None:
        self._policy = policy
        self._room = int(policy.retained_fraction * capacity_tokens)
        self._computed = computed
        self._entries: dict[int, _Entry] = {}
        self._keys: dict[_PrefixKey, int] = {}  # the latest session with this prefix
        self._retained: dict[int, int] = {}  # ended sessions and their tokens, least recently used first

    def find(self, owner: PeerId, span: LayerSpan, block_hashes: Sequence[bytes]) -> tuple[int, int]:
        """The session that shares the longest prefix, and how many tokens; (-1, 0) if none does."""
        for count in range(len(block_hashes), 0, -1):
            key = self._keys.get((owner, span, block_hashes[count - 1]))
            if key is not None and self._tokens(key) >= count * HASH_BLOCK_TOKENS:
                if key in self._retained:
                    self._retained[key] = self._retained.pop(key)
                return key, count * HASH_BLOCK_TOKENS
        return -1, 0

    def add(self, key: int, owner: PeerId, span: LayerSpan, block_hashes: Sequence[bytes]) -> None:
        """Register a live session, whose prompt has these block hashes."""
        self._entries[key] = _Entry(owner, span)
        self._add_prefixes(key, block_hashes)

    def retain(self, key: int, block_hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """A session has ended. -> (how many of its tokens to retain, 0 for none; ended sessions to evict for it)."""
        entry = self._entries[key]
        self._add_prefixes(key, block_hashes)
        tokens = (
            min(self._computed(key), len(block_hashes) * HASH_BLOCK_TOKENS) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
        )
        if not 0 < tokens <= self._room:
            return 0, []
        evicted: list[int] = []
        own = [k for k in self._retained if self._entries[k].owner == entry.owner]
        if len(own) >= self._policy.max_retained_per_peer:
            evicted.append(own[0])
        total = sum(self._retained.values()) - sum(self._retained[k] for k in evicted)
        for old in self._retained:
            if total + tokens <= self._room:
                break
            if old not in evicted:
                evicted.append(old)
                total -= self._retained[old]
        entry.tokens = self._retained[key] = tokens
        return tokens, evicted

    def evict_candidate(self) -> int | None:
        """The ended session to evict first."""
        return next(iter(self._retained), None)

    def of(self, owner: PeerId) -> list[int]:
        """The ended sessions of a client."""
        return [key for key in self._retained if self._entries[key].owner == owner]

    def forget(self, key: int) -> None:
        """Idempotent."""
        self._retained.pop(key, None)
        entry = self._entries.pop(key, None)
        for prefix in entry.prefixes if entry else ():
            if self._keys.get(prefix) == key:
                del self._keys[prefix]

    def _add_prefixes(self, key: int, block_hashes: Sequence[bytes]) -> None:
        entry = self._entries[key]
        for block_hash in block_hashes[len(entry.prefixes) :]:
            prefix = (entry.owner, entry.span, block_hash)
            entry.prefixes.append(prefix)
            self._keys[prefix] = key

    def _tokens(self, key: int) -> int:
        retained = self._entries[key].tokens
        return self._computed(key) if retained is None else retained
