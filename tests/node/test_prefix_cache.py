"""Prefixes that sessions share: which are found, and what is retained of sessions that have ended."""

from __future__ import annotations

import random

import pytest

from swarm.block_hash import HASH_BLOCK_TOKENS, block_hashes
from swarm.types import LayerSpan
from swarm_hop.serving.policy import PrefixCachePolicy
from swarm_hop.serving.prefix_cache import PrefixCache

SPAN = LayerSpan(0, 4)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50000) for _ in range(length)]


def test_equal_prefixes_have_equal_block_hashes_and_others_do_not() -> None:
    one = text(5 * HASH_BLOCK_TOKENS + 7)
    other = [*one[: 2 * HASH_BLOCK_TOKENS], *text(3 * HASH_BLOCK_TOKENS, 1)]
    a, b = block_hashes(one), block_hashes(other)
    assert (len(a), len(b)) == (5, 5)
    assert a[:2] == b[:2]
    assert all(x != y for x, y in zip(a[2:], b[2:], strict=True))
    assert block_hashes(one[: HASH_BLOCK_TOKENS - 1]) == []
    assert len(set(a)) == 5


def test_the_longest_cached_prefix_of_the_same_client_is_found() -> None:
    computed = {1: 0, 2: 0}
    prefixes = PrefixCache(10_000, computed.__getitem__)
    hashes = block_hashes(text(4 * HASH_BLOCK_TOKENS))
    prefixes.add(1, "me", SPAN, hashes)
    assert prefixes.find("me", SPAN, hashes) == (-1, 0), "nothing is computed yet"
    computed[1] = 2 * HASH_BLOCK_TOKENS + 5
    assert prefixes.find("me", SPAN, hashes) == (1, 2 * HASH_BLOCK_TOKENS)
    assert prefixes.find("you", SPAN, hashes) == (-1, 0)
    assert prefixes.find("me", LayerSpan(1, 4), hashes) == (-1, 0)
    prefixes.add(2, "me", SPAN, hashes[:1])
    computed[2] = 9 * HASH_BLOCK_TOKENS
    assert prefixes.find("me", SPAN, hashes) == (1, 2 * HASH_BLOCK_TOKENS)
    prefixes.forget(1)
    assert prefixes.find("me", SPAN, hashes) in [(2, HASH_BLOCK_TOKENS), (-1, 0)]


def test_an_ended_session_is_retained_and_the_least_recently_used_is_evicted_first() -> None:
    computed: dict[int, int] = {}
    prefixes = PrefixCache(40 * HASH_BLOCK_TOKENS, computed.__getitem__)  # room for ten blocks
    whole = [text(4 * HASH_BLOCK_TOKENS + 9, seed) for seed in range(4)]
    gone: list[int] = []
    for key, tokens in enumerate(whole):
        prefixes.add(key, "me", SPAN, block_hashes(tokens[: 2 * HASH_BLOCK_TOKENS]))
        computed[key] = len(tokens)
        retained, evicted = prefixes.retain(key, block_hashes(tokens))
        assert retained == 4 * HASH_BLOCK_TOKENS
        gone += evicted
        for old in evicted:
            prefixes.forget(old)
    assert gone == [0, 1]
    assert prefixes.find("me", SPAN, block_hashes(whole[2])) == (2, 4 * HASH_BLOCK_TOKENS)
    assert prefixes.evict_candidate() == 3, "what was used last goes last"
    assert prefixes.find("me", SPAN, block_hashes(whole[0])) == (-1, 0)
    assert prefixes.of("me") == [3, 2]


def test_retained_sessions_are_bounded_per_client_and_in_length() -> None:
    computed = dict.fromkeys(range(100), HASH_BLOCK_TOKENS)
    prefixes = PrefixCache(10_000 * HASH_BLOCK_TOKENS, computed.__getitem__)
    evicted: list[int] = []
    for key in range(PrefixCachePolicy().max_retained_per_peer + 1):
        prefixes.add(key, "me", SPAN, ())
        evicted = prefixes.retain(key, block_hashes(text(HASH_BLOCK_TOKENS, key)))[1]
    assert evicted == [0]
    small = PrefixCache(2 * HASH_BLOCK_TOKENS, computed.__getitem__)
    small.add(1, "me", SPAN, ())
    assert small.retain(1, block_hashes(text(HASH_BLOCK_TOKENS))) == (0, [])


@pytest.mark.parametrize("seed", range(30))
def test_a_prefix_hit_always_has_equal_tokens(seed: int) -> None:
    rng = random.Random(seed)
    computed: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    ended: set[int] = set()
    prefixes = PrefixCache(60 * HASH_BLOCK_TOKENS, computed.__getitem__)
    for key in range(80):
        base = rng.choice(list(texts.values())) if texts else []
        tokens = base[: rng.randrange(len(base) + 1)] + text(rng.randrange(3 * HASH_BLOCK_TOKENS), 1000 * seed + key)
        owner = rng.choice(["a", "b"])
        parent, held = prefixes.find(owner, SPAN, block_hashes(tokens))
        if held:
            assert texts[parent][:held] == tokens[:held]
            assert computed[parent] >= held
        texts[key], computed[key] = tokens, held
        prefixes.add(key, owner, SPAN, block_hashes(tokens))
        computed[key] = rng.randint(held, len(tokens))
        if rng.random() < 0.5:
            living = [k for k in texts if k not in ended]
            end = rng.choice(living)
            ended.add(end)
            retained, evicted = prefixes.retain(end, block_hashes(texts[end]))
            for old in [*evicted, *([] if retained else [end])]:
                prefixes.forget(old)
