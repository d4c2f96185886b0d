"""Token buckets: rates hold, bursts are allowed, and those who share one are served in turn."""

from __future__ import annotations

import pytest

from swarm.token_bucket import KeyedBuckets, TokenBucket


def test_a_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10.0, burst=5.0)
    assert [bucket.take(1.0, 100.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert not bucket.take(1.0, 100.05)
    assert bucket.take(1.0, 100.125)
    assert [bucket.take(1.0, 1000.0) for _ in range(7)] == [True] * 5 + [False] * 2, "no more than the burst is kept"


def test_spending_on_credit_says_when_the_debt_is_paid() -> None:
    bucket = TokenBucket(rate=10.0, burst=5.0)
    assert bucket.spend(5.0, 0.0) == 0.0
    assert bucket.spend(2.0, 0.0) == pytest.approx(0.2)
    assert bucket.spend(0.0, 0.1) == pytest.approx(0.1)
    assert bucket.spend(0.0, 0.2) == pytest.approx(0.0, abs=1e-9)
    assert not bucket.take(1.0, 0.2)


def test_whoever_waits_as_told_keeps_to_the_rate() -> None:
    bucket, now, spent = TokenBucket(rate=10.0, burst=5.0), 0.0, 0
    while now < 100.0:
        now += bucket.spend(1.0, now) + 1e-6
        spent += 1
    assert spent == pytest.approx(1005, abs=3)


def test_time_that_goes_backwards_gives_nothing() -> None:
    bucket = TokenBucket(rate=10.0, burst=1.0)
    assert bucket.take(1.0, 50.0)
    assert not bucket.take(1.0, 0.0)
    assert bucket.take(1.0, 50.125)


def test_keys_have_buckets_of_their_own_and_only_so_many_are_remembered() -> None:
    buckets = KeyedBuckets(rate=1.0, burst=1.0, max_keys=3)
    assert buckets.take("a", 1.0, 0.0)
    assert not buckets.take("a", 1.0, 0.0)
    assert all(buckets.take(key, 1.0, 0.0) for key in "bcd")
    assert len(buckets) == 3
    assert buckets.take("a", 1.0, 0.0), "it was forgotten, and is new"
    assert not buckets.take("d", 1.0, 0.0)
