"""How many signatures a DHT node checks and how many bytes of entries it sends, so that both cost it a known share.

Owns the counts; whose entries are worth a check is said by the caller. Knows no entries.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.net.dht.policy import SignatureBudgetPolicy
from swarm.token_bucket import KeyedBuckets, TokenBucket
from swarm.types import PeerId


class VerificationBudget:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], policy: SignatureBudgetPolicy = SignatureBudgetPolicy()) -> None:
        self._clock = clock
        self._policy = policy
        self._fresh_until = clock() + policy.fresh_s
        self._known = TokenBucket(policy.known_per_s, policy.known_burst)
        self._new = TokenBucket(policy.new_per_s, policy.new_burst)
        self._stores = KeyedBuckets(policy.store_per_s, policy.store_burst)
        self._replies = KeyedBuckets(policy.reply_bytes_per_s, policy.reply_bytes_burst)

    def take_known(self, remaining_s: float) -> bool:
        """Whether to check a later entry of a peer whose entry that we hold lives `remaining_s` more."""
        now = self._clock()
        scarce = self._known.available(now) < self._known.burst / 2
        return not (scarce and remaining_s > self._policy.urgent_s) and self._known.take(1.0, now)

    def take_new(self) -> bool:
        """Whether to check an entry of a peer of which we hold none."""
        now = self._clock()
        if now > self._fresh_until:
            self._new.burst = min(self._new.burst, self._policy.settled_burst)
        return self._new.take(1.0, now)

    def take_store(self, peer: PeerId) -> bool:
        """Whether to check one more entry that `peer` wants us to store."""
        return self._stores.take(peer, 1.0, self._clock())

    def take_reply(self, peer: PeerId, size: int) -> bool:
        """Whether to send `peer` so many bytes of entries."""
        return self._replies.take(peer, size, self._clock())
