"""How many layers a reader believes a model has that it does not open, among hostile records."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from record_makers import LAYERS, MODEL, TTL_S, identity, record_at

from swarm.net.gossip import record_book
from swarm.net.gossip.model_depth import DepthClaim, ModelDepth, model_depth
from swarm.net.gossip.record_book import RecordBook, RecordBookPolicy
from swarm.net.security.identity import verify
from swarm.types import PeerId

NOW = 1_700_000_000.0
FALSE = LAYERS + 3


def claims(*of: tuple[int, int], named: bool = False, proven: bool = False) -> list[DepthClaim]:
    """(layers, how many say so)."""
    return [DepthClaim(layers, named, proven) for layers, count in of for _ in range(count)]


@pytest.mark.parametrize(
    ("given", "layers", "decided_by", "agreeing"),
    [
        ([], 0, "nobody", 0),
        (claims((30, 5)), 30, "all", 5),
        (claims((30, 2), (99, 3)), 99, "all", 3),
        (claims((99, 4000)) + claims((30, 1), named=True), 30, "named", 1),
        (claims((99, 4000), proven=True) + claims((30, 1), named=True), 30, "named", 1),
        (claims((99, 4000)) + claims((30, 2), proven=True), 30, "proven", 2),
        (claims((99, 1), named=True) + claims((30, 2), named=True), 30, "named", 2),  # one named peer lies
        (claims((99, 1), (30, 1), named=True) + claims((30, 3)), 30, "named", 1),  # ... of two
        (claims((40, 2), (30, 2)), 30, "all", 2),
    ],
)
def test_whose_word_counts(given: list[DepthClaim], layers: int, decided_by: str, agreeing: int) -> None:
    chosen = model_depth(given)
    assert (chosen.layers, chosen.decided_by, chosen.agreeing) == (layers, decided_by, agreeing)
    assert str(chosen.agreeing) in chosen.reason or decided_by == "nobody"


def test_what_the_named_said_stays_when_they_are_gone_and_only_then() -> None:
    before = model_depth(claims((30, 1), named=True))
    assert model_depth(claims((99, 50), proven=True), before) == before
    assert model_depth(claims((40, 1), named=True), before).layers == 40
    assert model_depth([], before) == before
    by_all = model_depth(claims((30, 1)))
    assert model_depth(claims((99, 2)), by_all).layers == 99


def test_the_choice_is_that_of_the_best_group_whatever_the_order() -> None:
    rng = random.Random(4)
    for _ in range(300):
        given = [
            DepthClaim(rng.randint(1, 3), rng.random() < 0.1, rng.random() < 0.3) for _ in range(rng.randint(1, 12))
        ]
        chosen = model_depth(given)
        group = [c for c in given if c.is_named] or [c for c in given if c.is_proven] or given
        votes = Counter(claim.layers for claim in group)
        assert votes[chosen.layers] == max(votes.values()) == chosen.agreeing
        assert chosen.voters == len(group)
        rng.shuffle(given)
        assert model_depth(given) == chosen


# In a book ------------------------------------------------------------------------------------------------------------


def book(*named: int, **policy: int) -> RecordBook:
    return RecordBook(
        MODEL,
        None,
        verify,
        random.Random(5),
        named=[identity(number).peer for number in named],
        policy=RecordBookPolicy(**policy),  # type: ignore[arg-type]
    )


def read(reader: RecordBook, honest: range, hostile: range, at: float) -> None:
    """What the directory has: records of another depth, and the honest ones."""
    found = {identity(number).peer: record_at(number, at, layers=FALSE) for number in hostile}
    found |= {identity(number).peer: record_at(number, at) for number in honest}
    reader.offer_directory(found)
    reader.examine(reader.to_examine(at), at)


def seen(reader: RecordBook, now: float) -> set[PeerId]:
    return {node.peer for node in reader.snapshot(now).nodes}


def peers(numbers: range) -> set[PeerId]:
    return {identity(number).peer for number in numbers}


def test_a_hundred_hostile_records_against_one_named_peer() -> None:
    reader = book(1)
    read(reader, range(1, 4), range(100, 200), NOW)
    assert seen(reader, NOW) == peers(range(1, 4))
    snapshot = reader.snapshot(NOW)
    assert snapshot.num_layers == LAYERS
    assert snapshot.rejected_records == {"wrong_depth": 100}
    assert reader.depth == ModelDepth(LAYERS, "named", 1, 1)
    assert reader.snapshot(NOW).rejected_records == {"wrong_depth": 100}, "a look does not count them twice"
    read(reader, range(2, 4), range(100, 200), NOW + TTL_S)  # the named one is gone
    assert seen(reader, NOW + TTL_S) == peers(range(2, 4))


def test_a_named_peer_that_lies_alone_is_believed_until_a_second_one_is_named() -> None:
    """Whoever is started with one hostile peer sees what it shows: docs/security.md."""
    alone, with_others = book(100), book(100, 1, 2)
    for reader in (alone, with_others):
        read(reader, range(1, 4), range(100, 101), NOW)
    assert seen(alone, NOW) == peers(range(100, 101))
    assert alone.snapshot(NOW).rejected_records == {"wrong_depth": 3}
    assert seen(with_others, NOW) == peers(range(1, 4))


def test_who_has_paid_outweighs_who_has_not_where_nobody_named_serves_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = peers(range(1, 4))
    monkeypatch.setattr(record_book, "proof_bits", lambda peer, proof, now: int(peer in honest))
    reader = book(50)
    found = {identity(number).peer: record_at(number, NOW, layers=FALSE) for number in range(100, 200)}
    reader.offer_directory(found | {identity(n).peer: record_at(n, NOW, proof=b"paid") for n in range(1, 4)})
    reader.examine(reader.to_examine(NOW), NOW)
    assert seen(reader, NOW) == honest
    assert reader.depth.decided_by == "proven"


def test_without_anybody_there_is_no_depth_and_a_first_record_gives_one() -> None:
    reader = book(1)
    assert (reader.snapshot(NOW).num_layers, reader.depth.decided_by) == (0, "nobody")
    read(reader, range(2, 3), range(0), NOW)
    assert (reader.snapshot(NOW).num_layers, reader.depth.decided_by) == (LAYERS, "all")
    read(reader, range(0), range(100, 103), NOW + 1)
    assert seen(reader, NOW + 1) == peers(range(100, 103)), "three strangers against one"
    read(reader, range(1, 3), range(100, 103), NOW + 2)
    assert seen(reader, NOW + 2) == peers(range(1, 3))


def test_hostile_records_in_bulk_do_not_push_out_the_named_ones() -> None:
    reader = book(1, max_records=40, slack=0)
    for second in range(12):
        read(reader, range(1, 2), range(100 + 30 * second, 130 + 30 * second), NOW + second)
        assert seen(reader, NOW + second) == peers(range(1, 2))
        assert len(reader) <= 41


def test_a_book_that_knows_the_depth_takes_nobodys_word() -> None:
    reader = RecordBook(MODEL, LAYERS, verify, random.Random(5), named=[identity(100).peer])
    read(reader, range(1, 2), range(100, 103), NOW)
    assert seen(reader, NOW) == peers(range(1, 2))
    assert reader.depth.decided_by == "model"
