"""Who may start a handshake with us: so many a second, and so many unfinished ones at once, for each address block.

A handshake costs its receiver a descriptor, buffers and a millisecond of cryptography before it knows who asks. Owns
the counts. Pure: callers pass the time, and close what they are told to. When there is no room, the unfinished
handshake that is oldest makes way for the newest, within the block that has most: an honest one takes a few round
trips, and one that is held open on purpose is always older.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from swarm.token_bucket import KeyedBuckets, TokenBucket

_H = TypeVar("_H")


@dataclass(frozen=True, slots=True)
class HandshakePolicy:
    """Handshakes that others start: how quickly newcomers get in against what a flood may cost. One takes 2 ms."""

    per_s: float = 60.0  # of all together: 12% of a core
    burst: float = 160.0
    block_per_s: float = 6.0  # of one address block: connections last for hours, and on a small machine one takes 10 ms
    block_burst: float = 40.0  # a house or a machine whose peers all come at once
    max_half_open: int = 48  # descriptors and buffers
    max_half_open_per_block: int = 16
    timeout_s: float = 4.0  # for TLS and preamble together: links with a round trip of 1 s against idle holders
    refusals_per_s: float = 500.0  # connections looked at; more wait in the kernel's queue. Looking at one takes 50 us
    backlog: int = 128  # of the kernel's queue

    def for_part(self, part: float) -> HandshakePolicy:
        """For a machine whose event loop gets that part of a core. A few newcomers of a block get in on any."""
        block_per_s = min(self.block_per_s, max(1.0, part * self.block_per_s))
        block_burst = min(self.block_burst, max(10.0, part * self.block_burst))
        burst = max(block_burst, part * self.burst)
        return replace(self, per_s=part * self.per_s, burst=burst, block_per_s=block_per_s, block_burst=block_burst)


class HalfOpen(Generic[_H]):
    """`admit` a connection that wants a handshake; `done` when that has ended, whichever way."""

    def __init__(self, policy: HandshakePolicy = HandshakePolicy()) -> None:
        self._policy = policy
        self._all = TokenBucket(policy.per_s, policy.burst)
        self._blocks = KeyedBuckets(policy.block_per_s, policy.block_burst)
        self._open: OrderedDict[_H, str] = OrderedDict()  # -> its address block, oldest first
        self._counts: Counter[str] = Counter()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, handshake: _H, block: str, now: float) -> list[_H] | None:
        """-> the unfinished ones to drop for it, which count no more; None if it is refused."""
        if not (self._blocks.take(block, 1.0, now) and self._all.take(1.0, now)):
            self.refused += 1
            return None
        dropped: list[_H] = []
        if self._counts[block] >= self._policy.max_half_open_per_block:
            dropped.append(self._drop_oldest(block))
        if len(self._open) >= self._policy.max_half_open:
            dropped.append(self._drop_oldest(max(self._counts, key=self._counts.__getitem__)))
        self._open[handshake] = block
        self._counts[block] += 1
        return dropped

    def done(self, handshake: _H) -> None:
        """Idempotent."""
        block = self._open.pop(handshake, None)
        if block is not None:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]

    def _drop_oldest(self, block: str) -> _H:
        oldest = next(handshake for handshake, its_block in self._open.items() if its_block == block)
        self.done(oldest)
        return oldest
