"""Which chain a client believes to hold the beginning of a text."""

from __future__ import annotations

import random

from swarm.block_hash import BLOCK, digests
from swarm.types import Chain, Hop
from swarm_client.routing.prefix_locations import MAX_TEXTS, Beginnings


def chain(name: str) -> Chain:
    return Chain((Hop(name, 0, 4),))


def test_the_chain_that_has_been_furthest_is_found() -> None:
    rng = random.Random(3)
    for _ in range(300):
        texts = []
        for i in range(rng.randint(1, 6)):
            stem = rng.choice(texts)[1] if texts and rng.random() < 0.7 else []
            own = [rng.randint(0, 9) for _ in range(rng.randint(0, 4 * BLOCK))]
            texts.append((chain(f"n{i}"), stem[: rng.randint(0, len(stem))] + own))
        beginnings = Beginnings()
        for where, text in texts:
            beginnings.note(digests(text), where)
        asked = rng.choice(texts)[1][: rng.randint(0, 200)] + [11] * rng.randint(0, BLOCK)
        blocks = [sum(1 for a, b in zip(digests(t), digests(asked), strict=False) if a == b) for _, t in texts]
        found = beginnings.find(digests(asked))
        if not max(blocks):
            assert found is None
            continue
        assert found is not None
        assert found[1] == BLOCK * max(blocks)
        assert found[0] in [where for (where, _), n in zip(texts, blocks, strict=True) if n == max(blocks)]


def test_a_text_that_went_on_elsewhere_is_found_there() -> None:
    beginnings, text = Beginnings(), digests(list(range(3 * BLOCK)))
    beginnings.note(text, chain("a"))
    beginnings.note(text, chain("b"))
    assert beginnings.find(text) == (chain("b"), 3 * BLOCK)


def test_what_is_remembered_is_bounded() -> None:
    beginnings = Beginnings()
    for i in range(MAX_TEXTS + 1):
        beginnings.note(digests([i] * BLOCK), chain(str(i)))
    beginnings.note([], chain("nothing"))
    assert beginnings.find(digests([0] * BLOCK)) is None
    assert beginnings.find(digests([1] * BLOCK)) == (chain("1"), BLOCK)
