"""Thanks for work: bounded, in proportion to it, and no more for the same work under many names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_swarm import node, snapshot

from swarm.planner.trust import evidence as of
from swarm.planner.trust.contribution import POLICY, client_weight, contributors, credits
from swarm.planner.trust.evidence import UNKNOWN, FailureKind, PeerEvidence
from swarm.records import MAX_OWNERS, owner_tag
from swarm.types import NodeProfile, PeerId, Snapshot

NOW = 1e6
MOST = POLICY.max_weight


def gave(layer_rows: float, at: float = NOW) -> PeerEvidence:
    return of.finished(of.met(UNKNOWN, at), layer_rows / 10, 10)


def owned(peer: PeerId, *clients: PeerId) -> NodeProfile:
    return replace(node(peer, 10, (0, 10)), owners=tuple(owner_tag(peer, client) for client in clients))


def weights(nodes: list[NodeProfile], known: dict[PeerId, PeerEvidence], *clients: PeerId) -> list[float]:
    seen: Snapshot = snapshot(10, nodes)
    found = contributors(seen, credits([known], NOW))
    return [client_weight(client, found) for client in clients]


def test_who_has_given_nothing_counts_one_and_who_has_given_much_four() -> None:
    nodes = [owned("n", "helper"), owned("m", "other"), node("bare", 10, (0, 10))]
    known = {"n": gave(POLICY.full), "bare": gave(POLICY.full)}
    assert weights(nodes, known, "helper", "other", "stranger") == [MOST, 1.0, 1.0]
    assert weights(nodes, {"n": gave(POLICY.full / 2)}, "helper") == [pytest.approx((1 + MOST) / 2)]
    assert weights(nodes, {"n": gave(1e12)}, "helper") == [MOST]


def test_work_fades_and_a_failed_audit_or_a_failure_ends_it() -> None:
    nodes = [owned("n", "helper")]
    old = {"n": gave(POLICY.full, NOW - POLICY.half_life_s)}
    assert weights(nodes, old, "helper") == [pytest.approx((1 + MOST) / 2)]
    assert weights(nodes, {"n": of.audited(gave(POLICY.full), False, NOW)}, "helper") == [1.0]
    assert weights(nodes, {"n": of.failed(gave(POLICY.full), FailureKind.SILENT, NOW)}, "helper") == [1.0]
    cheated_once = credits([{"n": gave(POLICY.full)}, {"n": of.audited(UNKNOWN, False, NOW)}], NOW)
    assert cheated_once == {}, "whichever model it was caught with"


def test_only_the_node_itself_names_its_owner() -> None:
    """Tags are bound to the node whose record carries them: a copied one names nobody."""
    thief = replace(node("thief", 10, (0, 10)), owners=owned("n", "helper").owners)
    assert weights([thief], {"thief": gave(POLICY.full)}, "helper") == [1.0]


@settings(deadline=None)
@given(
    work=st.lists(st.floats(0.0, 3 * POLICY.full), min_size=1, max_size=8),
    marks=st.lists(st.lists(st.integers(0, 9), max_size=MAX_OWNERS), min_size=8, max_size=8),
)
def test_all_names_of_one_attacker_together_get_no_more_than_its_work_is_worth(
    work: list[float], marks: list[list[int]]
) -> None:
    """Any number of nodes and of clients, each node naming whom it likes: the bound is the work itself."""
    nodes = [owned(f"n{i}", *(f"c{mark}" for mark in marks[i])) for i in range(len(work))]
    known = {f"n{i}": gave(rows) for i, rows in enumerate(work)}
    found = weights(nodes, known, *(f"c{i}" for i in range(10)))
    assert all(1.0 <= weight <= MOST for weight in found)
    bonus = math.fsum(weight - 1.0 for weight in found)
    assert bonus <= (MOST - 1.0) * math.fsum(work) / POLICY.full + 1e-6
    assert bonus <= (MOST - 1.0) * len(work) + 1e-6


def test_receipts_of_invented_clients_are_no_evidence() -> None:
    """Nothing but what the owner's own clients have measured goes in, so there is nothing to invent."""
    assert credits([], NOW) == {}
    assert weights([owned("n", "helper")], {}, "helper") == [1.0]


def test_what_is_looked_through_for_a_client_is_bounded() -> None:
    many = {f"n{i:04d}": gave(10.0 + i) for i in range(3 * POLICY.max_contributors)}
    kept = credits([many], NOW)
    assert len(kept) == POLICY.max_contributors
    assert min(kept) == f"n{2 * POLICY.max_contributors:04d}", "those that gave most"
