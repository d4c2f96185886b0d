"""Where a step hangs, from what the hops say of it."""

from __future__ import annotations

import random

import pytest

from swarm_client.health.stall_locator import HopProgress, StallTimer, hop_holding, stalled_hops

HOPS = ("a", "b", "c")
STEP = 7


def places(*counts: tuple[int, int]) -> dict[str, HopProgress]:
    return {peer: HopProgress(*count) for peer, count in zip(HOPS, counts, strict=False)}


@pytest.mark.parametrize(
    ("counts", "who"),
    [
        (((8, 7), (7, 7), (7, 7)), ("a",)),  # a has it
        (((8, 8), (8, 6), (6, 6)), ("b",)),  # b has it, and the one before as well
        (((8, 8), (8, 8), (8, 0)), ("c",)),
        (((7, 7), (7, 7), (7, 7)), ("a",)),  # it never came to a
        (((8, 8), (7, 7), (7, 7)), ("b", "a")),  # between a and b
        (((8, 8), (8, 8), (5, 5)), ("c", "b")),
        (((8, 8), (8, 8), (8, 8)), ("c",)),  # c says that it has answered
        (((8, 8), (8, 8)), ()),  # c has not said
    ],
)
def test_who_is_suspected(counts: tuple[tuple[int, int], ...], who: tuple[str, ...]) -> None:
    assert stalled_hops(HOPS, places(*counts), STEP) == who


def test_one_hung_place_is_always_among_the_suspects() -> None:
    rng = random.Random(3)
    for _ in range(500):
        n = rng.randint(1, 6)
        peers = tuple(f"p{i}" for i in range(n))
        hung, on_edge = rng.randrange(n), rng.random() < 0.5
        last = rng.randint(0, STEP)  # done by whoever is behind
        seen = {
            peer: HopProgress(STEP + 1, STEP + 1) if i < hung else HopProgress(last, last)
            for i, peer in enumerate(peers)
        }
        if not on_edge:
            seen[peers[hung]] = HopProgress(STEP + 1, rng.randint(0, STEP))
        found = stalled_hops(peers, seen, STEP)
        assert found[0] == peers[hung]
        assert on_edge or len(found) == 1


def test_a_standstill_lasts_until_anything_moves() -> None:
    still = StallTimer()
    assert still.lasted_s(places((1, 0)), 10.0) == 0.0
    assert still.lasted_s(places((1, 0)), 14.0) == 4.0
    assert still.lasted_s(places((1, 1)), 15.0) == 0.0
    assert still.lasted_s(places((1, 1)), 16.5) == 1.5


def test_a_standstill_is_one_although_time_goes_by_at_the_hop() -> None:
    still = StallTimer()
    assert still.lasted_s({"a": HopProgress(8, 7, 100.0)}, 10.0) == 0.0
    assert still.lasted_s({"a": HopProgress(8, 7, 4100.0)}, 14.0) == 4.0


@pytest.mark.parametrize(
    ("counts", "who"),
    [
        (((8, 7), (7, 7), (7, 7)), "a"),
        (((8, 7), (8, 7), (7, 7)), "b"),  # a is about to say that it has sent it on
        (((8, 8), (8, 8), (8, 6)), "c"),
        (((8, 8), (8, 7)), "b"),  # c has not said
        (((8, 8), (7, 7), (7, 7)), None),  # it is on its way
        (((9, 9), (8, 8), (8, 8)), None),  # its result is
        ((), None),
    ],
)
def test_who_says_that_it_has_a_step(counts: tuple[tuple[int, int], ...], who: str | None) -> None:
    assert hop_holding(HOPS, places(*counts), STEP) == who
