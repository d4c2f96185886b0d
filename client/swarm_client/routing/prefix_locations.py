"""Which chain has which text prefix in its hops' prefix caches, for prefix-aware routing.

This is all that a client stores about prefixes: the block hashes of its latest texts and the chain that each ran on, in
memory. The keys and values are the nodes' (`swarm_node` prefix cache), which evict them without notice: a match from
here is a hint, and `OpenSession.block_hashes` finds out how much is really cached. `SessionManager` records a text when
its session is opened and closed, and routes the next text with the same prefix to that chain where that pays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.types import Chain

MAX_TEXTS = 32  # latest texts whose prefixes are remembered


class PrefixLocations:
    """`hashes` are `swarm.block_hash.block_hashes` of a text, each of which covers all blocks before it."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, tuple[tuple[bytes, ...], Chain]] = OrderedDict()  # by their last hash

    def record(self, hashes: Sequence[bytes], chain: Chain) -> None:
        """The hops of `chain` have cached this text, or soon will."""
        if not hashes:
            return
        self._texts.pop(hashes[-1], None)
        self._texts[hashes[-1]] = tuple(hashes), chain
        while len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)

    def longest_match(self, hashes: Sequence[bytes]) -> tuple[Chain, int] | None:
        """The chain with the longest prefix of this text, and that prefix's tokens; the latest of equals."""
        best, furthest = None, 0
        for text, chain in reversed(self._texts.values()):
            shared = _shared_blocks(text, hashes)
            if shared > furthest:
                best, furthest = chain, shared
        return (best, furthest * HASH_BLOCK_TOKENS) if best is not None else None


def _shared_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many blocks two texts share: a hash covers all before it, so a bisection finds the last equal one."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
