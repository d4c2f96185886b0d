"""Which chain has which text prefix in its hops' prefix caches, for prefix-aware routing, and the salts of the hashes
by which each hop finds it.

This is all that a client stores about prefixes: the block hashes of its latest texts and the chain that each ran on, in
memory. The keys and values are the nodes' (`swarm_node` prefix cache), which evict them without notice: a match from
here is a hint, and `OpenSession.block_hashes` finds out how much is really cached. `SessionManager` records a text when
its session is opened and closed, and routes the next text with the same prefix to that chain where that pays.

The keys and values of a hop were computed from what the hops before it sent, and any of those may have lied. So the
block hashes for a hop are salted by the hops before it: without the liar nobody finds what was computed from its rows.
The first salt is a secret: the hashes of a text that a hop guesses would tell it whether the guess was right.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.types import Chain, PeerId

MAX_TEXTS = 32  # latest texts whose prefixes are remembered
MAX_LOST = 1024  # peers
SALT_BYTES = 16


class PrefixLocations:
    """`hashes` are `swarm.block_hash.block_hashes` of a text, each of which covers all blocks before it."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, tuple[tuple[bytes, ...], Chain]] = OrderedDict()  # by their last hash
        self._secret = os.urandom(SALT_BYTES)  # or whoever guesses a text could look for its hashes
        self._losses = 0  # so far
        self._lost: dict[PeerId, int] = {}  # the number of each peer's latest loss
        self._forgotten = 0  # the latest loss that is in no entry of `_lost`

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

    def salts(self, chain: Chain) -> Mapping[PeerId, bytes]:
        """For each hop's block hashes: of this client's secret, the hops before it, and how often they were lost."""
        salts: dict[PeerId, bytes] = {}
        salt = self._secret
        for hop in chain.hops:
            salts[hop.peer] = salt
            fields = (hop.peer, hop.start, hop.end, self._lost.get(hop.peer, self._forgotten))
            salt = hashlib.blake2b(repr(fields).encode(), digest_size=SALT_BYTES, key=salt).digest()
        return salts

    def lost(self, peers: Collection[PeerId]) -> None:
        """A chain went on without them: what hops behind them have cached is found by no later session.

        A session that was repaired goes on under the hashes it was opened with, though others send it rows now.
        """
        self._losses += 1
        self._lost.update(dict.fromkeys(peers, self._losses))
        if len(self._lost) > MAX_LOST:
            self._lost.clear()
            self._forgotten = self._losses
        for text in [text for text, (_, chain) in self._texts.items() if set(chain.peers).intersection(peers)]:
            del self._texts[text]


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
