"""Where this client's texts have been: which chain has which beginning behind it.

Owns what is remembered, newest last. Hops forget on their own account: an answer from here is a hope and no promise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.types import Chain

MAX_TEXTS = 32


class PrefixLocations:
    """`names` are `swarm.block_hash.digests` of a text, each of which covers all before it."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, tuple[tuple[bytes, ...], Chain]] = OrderedDict()  # by their last name

    def record(self, names: Sequence[bytes], chain: Chain) -> None:
        """`chain` has this text behind it, or soon will."""
        if not names:
            return
        self._texts.pop(names[-1], None)
        self._texts[names[-1]] = tuple(names), chain
        while len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)

    def longest_match(self, names: Sequence[bytes]) -> tuple[Chain, int] | None:
        """The chain that has been furthest along this text, and how many of its tokens; the latest of equals."""
        best, furthest = None, 0
        for text, chain in reversed(self._texts.values()):
            shared = _shared(text, names)
            if shared > furthest:
                best, furthest = chain, shared
        return (best, furthest * HASH_BLOCK_TOKENS) if best is not None else None


def _shared(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many names two texts share: all up to the last equal one, so a bisection finds it."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
