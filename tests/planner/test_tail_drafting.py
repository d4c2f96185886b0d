"""What drafts of the tail are worth, and where a drafter is better run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.planner.speculation.drafter_choice import DrafterKind, DrafterOffer, explain_tail, prefers_tail
from swarm.planner.speculation.drafter_place import Place, TailOffer, choose_place, find_tail_offer
from swarm.planner.speculation.policy import PlacePolicy, TailValuePolicy
from swarm.planner.speculation.tail_value import TailDraftValue
from swarm.types import Hop, LayerSpan, NodeProfile, NodeState, OfferedDrafter, Snapshot

EAGLE = OfferedDrafter("eagle", "E", b"e" * 16, (2, 4, 7), 3.0)
POLICY = PlacePolicy(link_bytes_per_ms=1000.0, step_rows=10)


def node(peer: str, start: int, end: int, drafter: OfferedDrafter | None = None, weights: str = "h") -> NodeProfile:
    span = LayerSpan(start, end)
    return NodeProfile(peer, peer, NodeState.SERVING, "bf16", weights, 8, span, drafter=drafter)


def test_bytes_decide_between_places_of_one_speed() -> None:
    early = choose_place(3.0, 3.0, (2, 1, 0, 0), 1000, POLICY)  # carried over three links
    assert (early.place, early.client_bytes, early.tail_bytes) == (Place.CLIENT, 30_000, 20_000 + 60_000 + 150)
    late = choose_place(3.0, 3.0, (0, 0, 0, 3), 1000, POLICY)  # the tail has them all
    assert (late.place, late.client_bytes, late.tail_bytes) == (Place.TAIL, 30_000, 150)
    assert late.reason == (
        "it adds 3.1 ms at the tail (a tree 3.0 ms, 0.1 kB along 3 links) to a round of 10 rows, "
        "and 33.0 ms here (a tree 3.0 ms, 30.0 kB from the nodes)"
    )


@pytest.mark.parametrize(
    ("client_ms", "tail_ms", "place", "why"),
    [
        (None, 5.0, Place.TAIL, "the client has no such drafter"),
        (5.0, None, Place.CLIENT, "no last node offers one"),
        (None, None, None, "neither"),
        (200.0, 5.0, Place.TAIL, "at the tail (a tree 5.0 ms"),
        (5.0, 200.0, Place.CLIENT, "here (a tree 5.0 ms"),
    ],
)
def test_who_has_the_compute_decides(
    client_ms: float | None, tail_ms: float | None, place: Place | None, why: str
) -> None:
    found = choose_place(client_ms, tail_ms, (0, 1, 1, 1), 1000, POLICY)
    assert found.place is place
    assert why in found.reason


@given(
    st.floats(0, 1e4), st.floats(0, 1e4), st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 1 << 16)
)
def test_the_cheaper_place_is_taken(client_ms: float, tail_ms: float, taps: list[int], row_bytes: int) -> None:
    found = choose_place(client_ms, tail_ms, taps, row_bytes, POLICY)
    assert found.client_ms is not None
    assert found.tail_ms is not None
    assert found.client_ms >= client_ms
    assert found.tail_ms >= tail_ms
    cheapest = min(found.client_ms, found.tail_ms)
    assert cheapest == (found.tail_ms if found.place is Place.TAIL else found.client_ms)
    assert "\n" not in found.reason


def test_the_offer_is_what_most_last_nodes_hold() -> None:
    other = OfferedDrafter("mtp", "M", b"m" * 16, (8,))
    nodes = [
        node("a", 0, 3),
        node("b", 3, 6),
        node("c", 6, 8, EAGLE),
        node("d", 6, 8, EAGLE),
        node("e", 4, 8, other),
        node("f", 6, 8),
        node("g", 6, 8, other, "other weights"),
    ]
    found = find_tail_offer(Snapshot("m", 8, tuple(nodes)), "h")
    assert found is not None
    assert (found.drafter, found.tails, found.of) == (EAGLE, 2, 4)
    assert [hop.end for hop in found.hops] == [3, 6, 8]
    assert found.taps_of_hops() == (1, 1, 1)
    assert str(found) == "the EAGLE-3 drafter E at the tail, which 2 of 4 last nodes hold"
    assert find_tail_offer(Snapshot("m", 8, tuple(nodes[:2])), "h") is None
    assert find_tail_offer(Snapshot("m", 8, tuple(nodes)), "unknown") is None


def test_kinds_decide_before_places() -> None:
    offer = TailOffer(EAGLE, 3, 4, (Hop("a", 0, 8),))
    by_kind = {kind: prefers_tail(offer, DrafterOffer(kind, "x")) for kind in DrafterKind}
    assert by_kind == {
        DrafterKind.DFLASH: False,
        DrafterKind.EAGLE: None,
        DrafterKind.MTP: True,
        DrafterKind.BUNDLED: True,
        DrafterKind.MEDUSA: True,
    }
    rare = TailOffer(EAGLE, 1, 4)
    assert prefers_tail(rare, DrafterOffer(DrafterKind.BUNDLED, "x")) is False
    assert prefers_tail(rare, DrafterOffer(DrafterKind.MEDUSA)) is True
    assert prefers_tail(rare, None) is True
    assert explain_tail(offer, "so", ("y: no",)) == (
        "drafting with n-grams and the EAGLE-3 drafter E at the tail, which 3 of 4 last nodes hold, because so; "
        "without y: no"
    )


def test_a_draft_brings_what_the_next_result_accepts_of_it() -> None:
    value = TailDraftValue(TailValuePolicy(trial_drafts=2, decay=0.5))
    value.came([1])
    value.received({(): ((4, -0.1),), (4,): ((5, -0.1),)}, 2.0)
    value.came([4, 5, 6])  # the last would have come anyway
    assert (value.drafts, value.tokens, value.brought) == (1, 2, 2.0)
    value.received({(): ((4, -0.1),)}, 2.0)
    value.came([4])
    assert (value.tokens, value.took_ms) == (2, 2.0)
    value.received({}, 4.0)
    value.came([9, 9])
    assert value.drafts == 3
    rate = value.brought / value.took_ms
    assert value.pays(0.99 * rate)
    assert not value.pays(1.01 * rate)
    assert "brings" in value.explain(rate)


def test_drafts_are_tried_before_they_end() -> None:
    value = TailDraftValue()
    for _ in range(value.policy.trial_drafts):
        assert value.pays(1.0)
        value.received({}, 10.0)
        value.came([1, 2])
    assert not value.pays(1.0)


def test_drafts_that_nobody_sends_along_are_not_judged_and_end_later() -> None:
    value = TailDraftValue()
    for _ in range(value.policy.max_unused_drafts):
        value.received({}, 10.0)
        value.came([1], used=False)
        assert value.pays(1.0)
    value.received({}, 10.0)
    assert not value.pays(1.0)
