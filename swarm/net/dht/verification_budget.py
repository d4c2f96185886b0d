"""How many signatures a DHT node checks, so that hostile entries in bulk cost it a known share of a core.

Owns the counts; whose entries are worth a check is said by the caller. Knows no entries.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.net.dht.policy import VerificationPolicy
from swarm.types import PeerId


class _Bucket:
    """A token bucket."""

    __slots__ = ("_at", "burst", "per_s", "tokens")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self.burst, self.per_s = burst, per_s
        self.tokens, self._at = burst, now

    def refill(self, now: float) -> float:
        self.tokens = min(self.burst, self.tokens + (now - self._at) * self.per_s)
        self._at = now
        return self.tokens

    def take(self, now: float) -> bool:
        if self.refill(now) < 1.0:
            return False
        self.tokens -= 1.0
        return True


class VerificationBudget:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], policy: VerificationPolicy = VerificationPolicy()) -> None:
        self._clock = clock
        self._policy = policy
        self._known = _Bucket(policy.known_burst, policy.known_per_s, clock())
        self._new = _Bucket(policy.new_burst, policy.new_per_s, clock())
        self._stores: dict[PeerId, _Bucket] = {}

    def take_known(self, remaining_s: float) -> bool:
        """Whether to check a later entry of a peer whose entry that we hold lives `remaining_s` more."""
        now = self._clock()
        scarce = self._known.refill(now) < self._known.burst / 2
        return not (scarce and remaining_s > self._policy.urgent_s) and self._known.take(now)

    def take_new(self) -> bool:
        """Whether to check an entry of a peer of which we hold none."""
        return self._new.take(self._clock())

    def take_store(self, peer: PeerId) -> bool:
        """Whether to check one more entry that `peer` wants us to store."""
        now = self._clock()
        bucket = self._stores.get(peer)
        if bucket is None:
            if len(self._stores) >= 4096:
                self._stores = {
                    peer: bucket for peer, bucket in self._stores.items() if bucket.refill(now) < bucket.burst
                }
            bucket = self._stores[peer] = _Bucket(self._policy.store_burst, self._policy.store_per_s, now)
        return bucket.take(now)
