"""What a reader makes of records from a directory, from peers and from before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from record_makers import LAYERS, MODEL, TTL_S, forged, goodbye_at, identity, record_at

from swarm.gossip_messages import MAX_LISTED, MAX_RECORDS, RECORD_KEY_BYTES, pack_listed, unpack_listed
from swarm.net.gossip import record_book
from swarm.net.gossip.record_book import RecordBook, RecordBookPolicy
from swarm.net.gossip.record_offers import RecordIntakePolicy
from swarm.net.security.identity import verify
from swarm.records import InvalidRecord
from swarm.types import PeerId

NOW = 1_700_000_000.0


def book_of(
    own: int | None = None, verification: RecordIntakePolicy = RecordIntakePolicy(), **policy: float
) -> RecordBook:
    return RecordBook(
        MODEL,
        LAYERS,
        verify,
        random.Random(5),
        own=identity(own).peer if own is not None else "",
        policy=RecordBookPolicy(**policy),  # type: ignore[arg-type]
        verification=verification,
    )


def examine(book: RecordBook, now: float) -> list[str]:
    """-> the reasons for which records were rejected."""
    return [error.reason for _, error in book.examine(book.to_examine(now), now)]


def read(book: RecordBook, found: Sequence[int], now: float, at: float | None = None) -> None:
    """The directory has the records that these nodes published at `at`."""
    at = now if at is None else at
    book.offer_directory({identity(number).peer: record_at(number, at) for number in found})
    examine(book, now)


def seen(book: RecordBook, now: float) -> set[PeerId]:
    return {node.peer for node in book.snapshot(now).nodes}


def peers(*numbers: int) -> set[PeerId]:
    return {identity(number).peer for number in numbers}


def test_what_the_directory_forgets_is_remembered_until_it_expires() -> None:
    book = book_of()
    read(book, (1, 2), NOW)
    read(book, (), NOW + 1)
    assert seen(book, NOW + TTL_S - 0.1) == peers(1, 2)
    assert seen(book, NOW + TTL_S) == set()
    assert {node.peer for node in book.to_ask(NOW + TTL_S, 8)} == peers(1, 2)  # still worth asking


@pytest.mark.parametrize("order", [(1.0, 3.0, 2.0), (3.0, 1.0, 2.0), (2.0, 1.0, 3.0)])
def test_the_newest_record_wins_whoever_has_it(order: tuple[float, ...]) -> None:
    book = book_of()
    for source, at in enumerate(order, start=10):
        book.offer(record_at(1, NOW + at, sessions=int(at)), identity(source).peer)
        examine(book, NOW + 3)
    read(book, (1,), NOW + 3, at=NOW)
    assert [node.sessions for node in book.snapshot(NOW + 3).nodes] == [3]


def test_a_node_that_has_left_is_not_brought_back() -> None:
    book = book_of()
    read(book, (1, 2), NOW)
    book.offer(goodbye_at(1, NOW + 1), identity(2).peer)
    examine(book, NOW + 1)
    assert seen(book, NOW + 1) == peers(2)
    read(book, (1, 2), NOW + 2, at=NOW)  # the directory has not heard of it, and a peer replays
    book.offer(record_at(1, NOW + 0.5), identity(3).peer)
    examine(book, NOW + 2)
    assert seen(book, NOW + 2) == peers(2)
    found, _ = book.answer({}, 0, 1, NOW + 2)
    assert goodbye_at(1, NOW + 1) in found  # and others learn of it
    read(book, (1,), NOW + 3)
    assert seen(book, NOW + 3) == peers(1, 2)  # until it comes again


def test_bad_records_are_rejected_once_and_counted_every_time() -> None:
    checked: list[PeerId] = []

    def noting(peer: PeerId, data: bytes, signature: bytes) -> bool:
        checked.append(peer)
        return verify(peer, data, signature)

    book = RecordBook(MODEL, LAYERS, noting, random.Random(5))
    bad = {
        identity(1).peer: forged(record_at(1, NOW)),
        identity(2).peer: record_at(3, NOW),
        identity(4).peer: record_at(4, NOW, model="other"),
        identity(5).peer: record_at(5, NOW, layers=9),
        identity(6).peer: b"junk",
        identity(7).peer: record_at(7, NOW - 60),
        identity(8).peer: record_at(8, NOW + 60),
    }
    counts = {
        "bad_signature": 1,
        "wrong_subkey": 1,
        "wrong_model": 1,
        "wrong_depth": 1,
        "malformed": 1,
        "late": 1,
        "from_the_future": 1,
    }
    for _ in range(3):
        book.offer_directory(bad)
        examine(book, NOW)
        snapshot = book.snapshot(NOW)
        assert snapshot.nodes == ()
        assert snapshot.rejected_records == counts
    assert sorted(checked) == sorted(peers(1, 5))
    with pytest.raises(InvalidRecord):
        book.offer(b"junk", identity(1).peer)
    with pytest.raises(InvalidRecord):
        book.offer(bytes(3000), identity(1).peer)


def test_unchanged_records_cost_no_verification() -> None:
    calls = 0

    def counted(peer: PeerId, data: bytes, signature: bytes) -> bool:
        nonlocal calls
        calls += 1
        return verify(peer, data, signature)

    book = RecordBook(MODEL, LAYERS, counted, random.Random(1))
    for second in range(5):
        read(book, range(1, 30), NOW + second, at=NOW)
    assert calls == 29


def test_a_flood_is_verified_in_part_and_delays_nobody_who_is_known() -> None:
    policy = RecordIntakePolicy(per_s=20.0, newcomers_per_s=5.0, burst=20)
    book = book_of(verification=policy)
    read(book, (1, 2, 3), NOW)
    flood = {identity(number).peer: record_at(number, NOW) for number in range(1000, 1300)}
    for second in range(1, 31):
        now = NOW + second
        honest = {identity(number).peer: record_at(number, now) for number in (1, 2, 3)}
        book.offer_directory({**flood, **honest})
        looked_at = book.to_examine(now)
        assert len(looked_at) <= 20
        book.examine(looked_at, now)
        assert peers(1, 2, 3) <= seen(book, now)
        assert all(node.published_at == now for node in book.snapshot(now).nodes if node.peer in peers(1, 2, 3))


def test_identities_that_all_renew_do_not_make_the_long_known_expire() -> None:
    policy = RecordIntakePolicy(per_s=20.0, newcomers_per_s=5.0, burst=60)
    book = book_of(verification=policy)
    read(book, (1, 2, 3), NOW)
    for second in range(1, 40):
        now = NOW + second
        everybody = [*range(1000, 1050), 1, 2, 3]  # those in bulk come first in the directory
        read(book, everybody, now)
        assert peers(1, 2, 3) <= seen(book, now)


def test_the_book_is_bounded_and_keeps_who_was_known_long_ago() -> None:
    policy = RecordIntakePolicy(per_s=1000.0, newcomers_per_s=1000.0, burst=1000)
    book = book_of(verification=policy, max_records=40, slack=10, max_expired=5, sweep_s=1.0)
    read(book, (1, 2, 3), NOW)
    for minute in range(1, 12):  # they are known long before the others come
        read(book, (1, 2, 3), NOW + minute * 10)
    start = NOW + 120
    for second in range(10):
        now = start + second
        read(book, [1, 2, 3, *range(1000 + second * 30, 1030 + second * 30)], now)
        assert len(book) <= 50
        assert peers(1, 2, 3) <= seen(book, now)
    read(book, (), start + 60)
    assert len(book) <= 5
    assert peers(1, 2, 3) <= {node.peer for node in book.to_ask(start + 60, 10)}


def test_an_answer_has_what_the_other_lacks_with_our_own_first() -> None:
    book = book_of(own=1)
    read(book, (2, 3, 4), NOW)
    book.keep_own(record_at(1, NOW), NOW)
    found, more = book.answer({}, 0, 1, NOW)
    assert found[0] == record_at(1, NOW)
    assert set(found) == {record_at(number, NOW) for number in (1, 2, 3, 4)}
    assert not more
    other = book_of()
    for data in found[1:]:
        other.offer(data, identity(1).peer)
    examine(other, NOW)
    listed, number, slices = other.listing(NOW)
    listing = unpack_listed(pack_listed(listed))
    assert book.answer(listing, number, slices, NOW) == ([record_at(1, NOW)], False)
    read(book, (2, 3), NOW + 1)  # a second's news is not worth it, three are
    assert book.answer(listing, number, slices, NOW + 1)[0] == [record_at(1, NOW)]
    read(book, (2, 3), NOW + 3)
    assert set(book.answer(listing, number, slices, NOW + 3)[0]) == {
        record_at(1, NOW),
        record_at(2, NOW + 3),
        record_at(3, NOW + 3),
    }


def test_a_large_book_is_passed_on_in_slices() -> None:
    policy = RecordIntakePolicy(burst=2000)
    large, small = book_of(verification=policy), book_of(verification=policy)
    read(large, range(1, 801), NOW)
    assert len(seen(large, NOW)) == 800
    found, more = large.answer({}, 0, 1, NOW)
    assert len(found) <= MAX_RECORDS
    assert sum(map(len, found)) <= RecordBookPolicy().answer_bytes
    assert more
    questions = 0
    while len(seen(small, NOW)) < 800 and questions < 60:
        questions += 1
        listed, number, slices = small.listing(NOW)
        assert len(listed) <= MAX_LISTED
        for data in large.answer(unpack_listed(pack_listed(listed)), number, slices, NOW)[0]:
            small.offer(data, identity(5000).peer)
        examine(small, NOW)
    assert len(seen(small, NOW)) == 800, questions


def test_a_listing_of_garbage_is_read_as_far_as_it_goes() -> None:
    assert unpack_listed(b"short") == {}
    assert unpack_listed(pack_listed([(b"k" * RECORD_KEY_BYTES, 5)]) + b"tail") == {b"k" * RECORD_KEY_BYTES: 5}


def test_what_a_file_kept_says_whom_to_ask_and_how_long_they_are_known() -> None:
    book = book_of(own=9)
    read(book, (1, 2), NOW)
    kept = book.longest_known(10)
    later = book_of()
    for data, first_seen in kept:
        later.remember(data, first_seen, NOW + 3600)
    assert seen(later, NOW + 3600) == set()
    assert {node.peer for node in later.to_ask(NOW + 3600, 5)} == peers(1, 2)
    with pytest.raises(InvalidRecord):
        later.remember(forged(record_at(3, NOW)), NOW, NOW)
    with pytest.raises(InvalidRecord):
        later.remember(record_at(3, NOW, model="other"), NOW, NOW)
    soon = book_of()
    soon.remember(*kept[0], NOW + 1)
    assert len(seen(soon, NOW + 1)) == 1


def test_of_strangers_alike_those_with_a_proof_of_work_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = peers(*range(100, 104))
    monkeypatch.setattr(record_book, "proof_bits", lambda peer, proof, now: 4 if peer in proven and proof else 0)
    book = book_of(max_records=8, slack=2)
    book.offer_directory({identity(n).peer: record_at(n, NOW, proof=b"p") for n in (*range(100, 104), *range(24))})
    examine(book, NOW)
    assert proven <= seen(book, NOW)
