"""Beginnings that sessions share: who finds what, and what is kept of sessions that have ended."""

from __future__ import annotations

import random

import pytest

from swarm.block_hash import HASH_BLOCK_TOKENS, block_hashes
from swarm.types import LayerSpan
from swarm_node.serving.policy import PrefixCachePolicy
from swarm_node.serving.prefix_cache import PrefixCache

SPAN = LayerSpan(0, 4)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50000) for _ in range(length)]


def test_equal_beginnings_have_equal_names_and_others_do_not() -> None:
    one = text(5 * HASH_BLOCK_TOKENS + 7)
    other = [*one[: 2 * HASH_BLOCK_TOKENS], *text(3 * HASH_BLOCK_TOKENS, 1)]
    a, b = block_hashes(one), block_hashes(other)
    assert (len(a), len(b)) == (5, 5)
    assert a[:2] == b[:2]
    assert all(x != y for x, y in zip(a[2:], b[2:], strict=True))
    assert block_hashes(one[: HASH_BLOCK_TOKENS - 1]) == []
    assert len(set(a)) == 5


def test_the_longest_computed_beginning_of_ones_own_is_found() -> None:
    computed = {1: 0, 2: 0}
    prefixes = PrefixCache(10_000, computed.__getitem__)
    names = block_hashes(text(4 * HASH_BLOCK_TOKENS))
    prefixes.add(1, "me", SPAN, names)
    assert prefixes.find("me", SPAN, names) == (-1, 0), "nothing is computed yet"
    computed[1] = 2 * HASH_BLOCK_TOKENS + 5
    assert prefixes.find("me", SPAN, names) == (1, 2 * HASH_BLOCK_TOKENS)
    assert prefixes.find("you", SPAN, names) == (-1, 0)
    assert prefixes.find("me", LayerSpan(1, 4), names) == (-1, 0)
    prefixes.add(2, "me", SPAN, names[:1])
    computed[2] = 9 * HASH_BLOCK_TOKENS
    assert prefixes.find("me", SPAN, names) == (1, 2 * HASH_BLOCK_TOKENS)
    prefixes.forget(1)
    assert prefixes.find("me", SPAN, names) in [(2, HASH_BLOCK_TOKENS), (-1, 0)]


def test_an_ended_session_is_kept_with_what_it_added_and_the_oldest_goes_first() -> None:
    computed: dict[int, int] = {}
    prefixes = PrefixCache(40 * HASH_BLOCK_TOKENS, computed.__getitem__)  # room for ten blocks
    whole = [text(4 * HASH_BLOCK_TOKENS + 9, seed) for seed in range(4)]
    gone: list[int] = []
    for key, tokens in enumerate(whole):
        prefixes.add(key, "me", SPAN, block_hashes(tokens[: 2 * HASH_BLOCK_TOKENS]))
        computed[key] = len(tokens)
        kept, going = prefixes.retain(key, block_hashes(tokens))
        assert kept == 4 * HASH_BLOCK_TOKENS
        gone += going
        for old in going:
            prefixes.forget(old)
    assert gone == [0, 1]
    assert prefixes.find("me", SPAN, block_hashes(whole[2])) == (2, 4 * HASH_BLOCK_TOKENS)
    assert prefixes.evict_candidate() == 3, "what was used last goes last"
    assert prefixes.find("me", SPAN, block_hashes(whole[0])) == (-1, 0)
    assert prefixes.of("me") == [3, 2]


def test_one_client_keeps_only_so_many_and_nothing_that_is_too_long() -> None:
    computed = dict.fromkeys(range(100), HASH_BLOCK_TOKENS)
    prefixes = PrefixCache(10_000 * HASH_BLOCK_TOKENS, computed.__getitem__)
    going: list[int] = []
    for key in range(PrefixCachePolicy().max_retained_per_peer + 1):
        prefixes.add(key, "me", SPAN, ())
        going = prefixes.retain(key, block_hashes(text(HASH_BLOCK_TOKENS, key)))[1]
    assert going == [0]
    small = PrefixCache(2 * HASH_BLOCK_TOKENS, computed.__getitem__)
    small.add(1, "me", SPAN, ())
    assert small.retain(1, block_hashes(text(HASH_BLOCK_TOKENS))) == (0, [])


@pytest.mark.parametrize("seed", range(30))
def test_what_is_found_always_begins_alike(seed: int) -> None:
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
            kept, going = prefixes.retain(end, block_hashes(texts[end]))
            for old in [*going, *([] if kept else [end])]:
                prefixes.forget(old)
