"""Token buckets: how much of something a peer, an address block or everybody may use, on average and at once.

Owns the arithmetic. Pure: callers pass the time, and decide whether to wait, to refuse or to slow somebody down.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable


class TokenBucket:
    """`rate` tokens a second, of which at most `burst` are kept; full at the start. Times in seconds, never less."""

    __slots__ = ("_at", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._at = -math.inf

    def spend(self, cost: float, now: float) -> float:
        """Take `cost`, on credit if need be. -> after how many seconds there is no debt left; 0 if there is none now.

        Whoever waits for so long before the next `spend` keeps to the rate. Several who share a bucket and each have
        one request at a time are served in turn, each as often as the others.
        """
        self._refill(now)
        self._tokens -= cost
        return 0.0 if self._tokens >= 0.0 else -self._tokens / self.rate

    def take(self, cost: float, now: float) -> bool:
        """Take `cost` if it is there; else nothing."""
        self._refill(now)
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True

    def available(self, now: float) -> float:
        """How much may be taken now; less than 0 in debt."""
        self._refill(now)
        return self._tokens

    def is_full(self, now: float) -> bool:
        """Whether it is as good as a new one."""
        self._refill(now)
        return self._tokens >= self.burst

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now


class KeyedBuckets:
    """A bucket for each key, of one rate and burst. `max_keys` bounds the memory: the one used least recently goes, and
    starts afresh when its key comes back."""

    def __init__(self, rate: float, burst: float, max_keys: int = 4096) -> None:
        self._rate = rate
        self._burst = burst
        self._max_keys = max_keys
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def spend(self, key: Hashable, cost: float, now: float) -> float:
        """See `TokenBucket.spend`."""
        return self._of(key).spend(cost, now)

    def take(self, key: Hashable, cost: float, now: float) -> bool:
        """See `TokenBucket.take`."""
        return self._of(key).take(cost, now)

    def _of(self, key: Hashable) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._rate, self._burst)
            if len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket
