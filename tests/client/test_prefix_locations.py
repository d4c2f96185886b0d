"""Which chain a client believes to hold the beginning of a text."""

from __future__ import annotations

import random

from swarm.block_hash import HASH_BLOCK_TOKENS, block_hashes, salted
from swarm.types import Chain, Hop
from swarm_client.routing.prefix_locations import MAX_LOST, MAX_TEXTS, PrefixLocations


def chain(name: str) -> Chain:
    return Chain((Hop(name, 0, 4),))


def test_the_chain_that_has_been_furthest_is_found() -> None:
    rng = random.Random(3)
    for _ in range(300):
        texts = []
        for i in range(rng.randint(1, 6)):
            stem = rng.choice(texts)[1] if texts and rng.random() < 0.7 else []
            own = [rng.randint(0, 9) for _ in range(rng.randint(0, 4 * HASH_BLOCK_TOKENS))]
            texts.append((chain(f"n{i}"), stem[: rng.randint(0, len(stem))] + own))
        beginnings = PrefixLocations()
        for where, text in texts:
            beginnings.record(block_hashes(text), where)
        asked = rng.choice(texts)[1][: rng.randint(0, 200)] + [11] * rng.randint(0, HASH_BLOCK_TOKENS)
        blocks = [
            sum(1 for a, b in zip(block_hashes(t), block_hashes(asked), strict=False) if a == b) for _, t in texts
        ]
        found = beginnings.longest_match(block_hashes(asked))
        if not max(blocks):
            assert found is None
            continue
        assert found is not None
        assert found[1] == HASH_BLOCK_TOKENS * max(blocks)
        assert found[0] in [where for (where, _), n in zip(texts, blocks, strict=True) if n == max(blocks)]


def test_a_text_that_went_on_elsewhere_is_found_there() -> None:
    beginnings, text = PrefixLocations(), block_hashes(list(range(3 * HASH_BLOCK_TOKENS)))
    beginnings.record(text, chain("a"))
    beginnings.record(text, chain("b"))
    assert beginnings.longest_match(text) == (chain("b"), 3 * HASH_BLOCK_TOKENS)


def test_what_is_remembered_is_bounded() -> None:
    beginnings = PrefixLocations()
    for i in range(MAX_TEXTS + 1):
        beginnings.record(block_hashes([i] * HASH_BLOCK_TOKENS), chain(str(i)))
    beginnings.record([], chain("nothing"))
    assert beginnings.longest_match(block_hashes([0] * HASH_BLOCK_TOKENS)) is None
    assert beginnings.longest_match(block_hashes([1] * HASH_BLOCK_TOKENS)) == (chain("1"), HASH_BLOCK_TOKENS)


A, B, C, D = Hop("a", 0, 2), Hop("b", 2, 4), Hop("c", 4, 6), Hop("d", 2, 4)


def test_a_hops_salt_is_of_the_hops_before_it() -> None:
    locations = PrefixLocations()
    salts = locations.salts(Chain((A, B, C)))
    assert salts["a"] != PrefixLocations().salts(Chain((A, B, C)))["a"], "no hop could compute it"
    assert len(set(salts.values())) == 3
    assert locations.salts(Chain((A, B, C))) == salts
    other = locations.salts(Chain((A, D, C)))
    assert other["d"] == salts["b"]
    assert other["c"] != salts["c"]
    longer = locations.salts(Chain((Hop("a", 0, 3), Hop("b", 3, 4), C)))
    assert longer["b"] != salts["b"]
    assert longer["c"] != salts["c"]


def test_what_was_cached_behind_a_lost_peer_is_found_no_more() -> None:
    locations, text = PrefixLocations(), block_hashes(list(range(HASH_BLOCK_TOKENS)))
    locations.record(text, Chain((A, B, C)))
    before = locations.salts(Chain((A, B, C)))
    locations.lost(["d"])
    assert locations.salts(Chain((A, B, C))) == before
    assert locations.longest_match(text) is not None
    locations.lost(["b"])
    assert locations.longest_match(text) is None
    after = locations.salts(Chain((A, B, C)))
    assert {peer for peer in after if after[peer] == before[peer]} == {"a", "b"}
    locations.lost(["b"])
    assert locations.salts(Chain((A, B, C)))["c"] not in (before["c"], after["c"])


def test_peers_without_number_bring_no_old_salt_back() -> None:
    locations, chain_ = PrefixLocations(), Chain((A, B, C))
    own, seen = locations.salts(chain_)["a"], {locations.salts(chain_)["c"]}
    for i in range(3 * MAX_LOST):
        locations.lost(["b"] if i == 1 else [f"stranger {i}"])
        seen.add(locations.salts(chain_)["c"])
    assert len(locations._lost) <= MAX_LOST
    assert len(seen) == 4  # the first, after the loss, and after each time that all were forgotten
    assert locations.salts(chain_)["a"] == own


def test_hashes_of_one_text_under_different_salts_have_nothing_in_common() -> None:
    text = block_hashes(list(range(4 * HASH_BLOCK_TOKENS)))
    assert salted(text, b"") == text
    assert not {*salted(text, b"1")} & {*text, *salted(text, b"2")}
    assert salted(text, b"1") == salted(text, b"1")
    assert salted(text[:2], b"1") == salted(text, b"1")[:2]
