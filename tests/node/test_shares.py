"""Whose account a peer's sessions go on, how often it may open them, and who makes room for whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import Limits
from swarm.errors import NodeBusy, ProtocolError
from swarm.planner.scheduling.fair_shares import Share
from swarm_hop.serving.policy import SessionPolicy
from swarm_hop.serving.quotas import Quotas
from swarm_hop.sharing.reclaim import Holding, newcomer_tokens, reclaim_slot, reclaim_tokens
from swarm_hop.sharing.shares import SharePlaces, SharePolicy


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_block_is_one_share_and_a_flood_of_identities_one_of_its_members() -> None:
    places = SharePlaces()
    early = places.of("early", "198.51.200.9")
    crowd = [places.of(f"x{i}", f"198.51.200.{i}") for i in range(100)]
    assert {share.block for share in crowd} == {early.block}
    assert len({share.member for share in crowd}) == SharePolicy().own_places  # one of them is that of all others
    assert places.of("early", "198.51.200.9") == early
    assert places.of("home", "8.8.8.8").block != early.block


@pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.7", "::1", "10.0.0.1"])
def test_neighbors_are_a_share_each_but_not_a_thousand(host: str) -> None:
    places = SharePlaces()
    shares = [places.of(f"peer {i}", host) for i in range(1000)]
    assert len({share.block for share in shares}) == SharePolicy().own_places + 1


def test_relayed_peers_are_one_block_and_owners_go_first() -> None:
    places = SharePlaces(weight=lambda peer: 1.5, is_owner=lambda peer: peer == "me")
    assert places.of("a", "").block == places.of("b", "").block
    assert places.of("a", "").weight == 1.5
    assert places.of("me", "").first


def test_places_are_given_up_after_a_while_and_memory_is_bounded() -> None:
    clock = Clock()
    places = SharePlaces(policy=SharePolicy(own_places=1, max_blocks=10), clock=clock)
    assert places.of("a", "8.8.8.8").member == "a"
    assert places.of("b", "8.8.8.8").member == ""
    clock.now = SharePolicy().keep_place_s + 1
    assert places.of("b", "8.8.8.8").member == "b"
    for i in range(100):
        places.of("c", f"8.8.{i}.1")
    assert len(places._places) <= 10


def test_opens_above_the_rate_are_refused_and_far_above_it_break_the_protocol() -> None:
    clock, policy = Clock(), SessionPolicy()
    quotas = Quotas(Limits(), policy, clock)
    flood, honest = Share("x", "x"), Share("h", "h")
    for _ in range(int(policy.opens_burst)):
        quotas.take_open(flood)
    with pytest.raises(NodeBusy) as refused:
        quotas.take_open(flood)
    assert 0.0 < refused.value.retry_after_s <= policy.max_retry_after_s
    quotas.take_open(honest)
    for _ in range(int(policy.opens_debt_s * policy.opens_per_s / policy.wrong_open_cost) + 1):
        quotas.take_wrong_open(flood)
    with pytest.raises(ProtocolError, match="far above"):
        quotas.take_open(flood)
    clock.now = 3600.0
    quotas.take_open(flood)
    for _ in range(10_000):
        quotas.take_open(Share("o", "me", first=True))


A, B, C = Share("a", "a"), Share("b", "b"), Share("c", "c")


def held(share: Share, count: int, reserved: int = 100, used: int = 10, idle_s: float = 0.0) -> list[Holding]:
    held.key += count  # type: ignore[attr-defined]
    first: int = held.key  # type: ignore[attr-defined]
    return [Holding(first + i, share, idle_s + i, reserved, used) for i in range(count)]


held.key = 0  # type: ignore[attr-defined]


def test_a_slot_comes_from_the_largest_holder_s_longest_idle_session() -> None:
    holdings = [*held(A, 6), *held(B, 2)]
    assert reclaim_slot(holdings, C, 8) == holdings[5].key
    assert reclaim_slot(holdings, B, 8) == holdings[5].key
    assert reclaim_slot(holdings, A, 8) is None, "it has more than its part"
    assert reclaim_slot([*held(A, 4), *held(B, 4)], B, 8) is None


def test_identities_of_one_block_are_one_holder() -> None:
    crowd = [holding for i in range(6) for holding in held(Share("x", i), 1)]
    assert reclaim_slot([*crowd, *held(B, 2)], C, 8) in {holding.key for holding in crowd}


def test_memory_comes_from_unused_reservations_first_and_from_sessions_last() -> None:
    holdings = held(A, 4, reserved=250, used=20)
    found = reclaim_tokens(holdings, B, 300, 1000)
    assert found is not None
    assert not found.end
    assert sum(250 - kept for kept in found.shrink.values()) >= 300
    assert all(kept >= 20 for kept in found.shrink.values())
    full = held(A, 4, reserved=250, used=250)
    found = reclaim_tokens(full, B, 300, 1000)
    assert found is not None
    assert found.end == (full[3].key, full[2].key)
    assert reclaim_tokens(full, B, 600, 1000) is None, "more than an equal part"
    assert reclaim_tokens(full, A, 10, 1000) is None


def test_reservations_decay_when_unused_even_within_a_part() -> None:
    holdings = held(A, 1, reserved=400, used=10, idle_s=60.0)
    found = reclaim_tokens([*holdings, *held(B, 1, reserved=600, used=600)], C, 300, 1000)
    assert found is not None
    assert list(found.shrink) == [holdings[0].key]
    busy = held(A, 1, reserved=400, used=10)
    found = reclaim_tokens([*busy, *held(B, 1, reserved=600, used=590)], C, 300, 1000)
    assert found is not None
    assert busy[0].key not in found.end


@given(
    holders=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200), st.integers(0, 200), st.floats(0, 100))),
    tokens=st.integers(1, 1000),
)
def test_whoever_is_within_its_part_keeps_what_it_uses(holders: list[tuple[int, int, int, float]], tokens: int) -> None:
    holdings = [
        Holding(key, Share(who, who), idle, max(reserved, used), used)
        for key, (who, reserved, used, idle) in enumerate(holders)
    ]
    capacity = sum(holding.reserved for holding in holdings) + 1
    me = Share("me", "me")
    found = reclaim_tokens(holdings, me, tokens, capacity)
    part = capacity / (len({holding.share for holding in holdings}) + 1)
    by_share = {s: sum(h.reserved for h in holdings if h.share == s) for s in {h.share for h in holdings}}
    if found is not None:
        freed = sum(h.reserved for h in holdings if h.key in found.end)
        freed += sum(h.reserved - found.shrink[h.key] for h in holdings if h.key in found.shrink)
        assert freed >= tokens
        for holding in holdings:
            if by_share[holding.share] <= part:
                assert holding.key not in found.end
            assert found.shrink.get(holding.key, holding.used) >= holding.used
    assert newcomer_tokens(holdings, 1, capacity) >= 1
