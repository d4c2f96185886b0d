"""Which drafter `auto` takes: the order of kinds, what it will not spend, and the sentence."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from swarm.planner.speculation.drafter_choice import DrafterKind, DrafterOffer, explain_choice, rank_drafters
from swarm.planner.speculation.policy import DrafterChoicePolicy

POLICY = DrafterChoicePolicy(max_fetch_bytes=100, max_memory_bytes=1000)
OFFERS = st.lists(
    st.builds(
        DrafterOffer, st.sampled_from(DrafterKind), st.sampled_from("abc"), st.integers(0, 200), st.integers(0, 2000)
    ),
    max_size=8,
    unique=True,
)


@given(OFFERS, st.integers())
def test_every_offer_is_tried_in_the_order_of_kinds_or_left_out_with_a_clause(
    offers: list[DrafterOffer], seed: int
) -> None:
    ranking = rank_drafters(offers, POLICY)
    kinds = [list(DrafterKind).index(offer.kind) for offer in ranking.offers]
    assert kinds == sorted(kinds)
    affordable = [offer for offer in offers if offer.fetch_bytes <= 100 and offer.memory_bytes <= 1000]
    assert set(ranking.offers) == set(affordable)
    assert len(ranking.left_out) == len(offers) - len(affordable)
    shuffled = list(offers)
    random.Random(seed).shuffle(shuffled)
    again = rank_drafters(shuffled, POLICY)
    assert [(o.kind, o.name) for o in again.offers] == [(o.kind, o.name) for o in ranking.offers]


def test_the_best_of_all_kinds_comes_first() -> None:
    offers = [DrafterOffer(kind, "x") for kind in reversed(DrafterKind)]
    assert [offer.kind for offer in rank_drafters(offers).offers] == ["dflash", "eagle", "mtp", "bundled", "medusa"]


def test_what_it_costs_too_much_is_said() -> None:
    ranking = rank_drafters(
        [DrafterOffer(DrafterKind.MTP, "big", 3 << 30), DrafterOffer(DrafterKind.MTP, "wide", 0, 5 << 30)]
    )
    assert ranking.offers == ()
    assert ranking.left_out == (
        "the MTP layer of big, of which 3.0 GiB would have to be fetched first",
        "the MTP layer of wide, which would take 5.0 GiB of memory here",
    )
    assert explain_choice(None, ranking.left_out[:1]) == (
        "drafting with n-grams alone: no other drafter is at hand; "
        "without the MTP layer of big, of which 3.0 GiB would have to be fetched first"
    )


def test_every_kind_has_a_sentence_of_one_line() -> None:
    for kind in DrafterKind:
        said = explain_choice(DrafterOffer(kind, "head"), ["a", "b"])
        assert said.startswith("drafting with n-grams and the ")
        assert said.endswith("; without a; without b")
        assert "\n" not in said
        assert ", because " in said
