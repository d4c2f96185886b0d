"""Which chain a client believes to hold the beginning of a text."""

from __future__ import annotations

import random

from swarm.block_hash import HASH_BLOCK_TOKENS, block_hashes
from swarm.types import Chain, Hop
from swarm_client.routing.prefix_locations import MAX_TEXTS, PrefixLocations


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
