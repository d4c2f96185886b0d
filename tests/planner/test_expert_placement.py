"""Layers that are too big for a node: who leads, who holds which experts, what is missing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarm.errors import UsageError
from swarm.planner.placement.experts import (
    PlacedShare,
    assign_experts,
    holders,
    is_spare,
    missing_experts,
    place_shares,
)
from swarm.planner.routing.rules import ChainRules
from swarm.types import ExpertShare, LayerSpan, NodeProfile, NodeState, Snapshot

COUNT, LAYERS = 16, 3
ALL = range(LAYERS)


def share(first: int, end: int, layers: LayerSpan = LayerSpan(0, 1)) -> ExpertShare:
    return ExpertShare(layers, first, end, COUNT)


def node(peer: str, **changes: object) -> NodeProfile:
    base = NodeProfile(peer, "", NodeState.JOINING, "bf16", "h", layer_capacity=0, expert_room=6, lead_room=4)
    return replace(base, **changes)  # type: ignore[arg-type]


def leader(peer: str, own: ExpertShare, state: NodeState = NodeState.SERVING) -> NodeProfile:
    return node(peer, span=own.layers, experts=own, state=state)


def holder(peer: str, own: ExpertShare, state: NodeState = NodeState.SERVING) -> NodeProfile:
    return node(peer, experts=own, state=state)


def snapshot(*nodes: NodeProfile, layers: int = LAYERS) -> Snapshot:
    return Snapshot("m", layers, tuple(sorted(nodes, key=lambda n: n.peer)))


def joined(found: PlacedShare, one: NodeProfile) -> NodeProfile:
    made = leader if found.leads else holder
    return replace(made(one.peer, found.share, NodeState.LOADING), layer_capacity=0)


def test_small_nodes_that_join_together_serve_the_whole_model() -> None:
    view = snapshot(*(node(f"n{i:02}") for i in range(9)))
    placed = place_shares(view, COUNT, ALL)
    for layer in ALL:
        led = [p.share for p in placed.values() if p.leads and layer in p.share.layers]
        held = [p.share for p in placed.values() if not p.leads and layer in p.share.layers]
        assert len(led) == 1
        assert not missing_experts([layer], led[0], held)


def test_it_is_the_same_one_after_the_other() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        waiting = [
            node(f"n{i:02}", expert_room=rng.randrange(1, 17), lead_room=rng.randrange(-1, 8)) for i in range(14)
        ]
        there: list[NodeProfile] = []
        for one in waiting:
            found = place_shares(snapshot(one, *there), COUNT, ALL).get(one.peer)
            if found is not None:
                assert 0 <= found.share.first <= found.share.end <= COUNT
                room = one.lead_room if found.leads else one.expert_room
                assert len(found.share.experts) <= room
                assert found.leads or len(found.share.experts) > 0
                there.append(joined(found, one))
        together = place_shares(snapshot(*waiting), COUNT, ALL)
        assert {n.peer: n.experts for n in there} == {peer: p.share for peer, p in together.items()}


def test_what_is_missing_comes_first_then_replicas_of_what_the_fewest_hold() -> None:
    led = leader("a", share(0, 4))
    whole = node("w", span=LayerSpan(1, 3), state=NodeState.SERVING, layer_capacity=2)
    view = snapshot(led, holder("b", share(4, 10)), node("c"), whole)
    assert place_shares(view, COUNT, ALL)["c"] == PlacedShare(share(10, 16), leads=False)
    view = snapshot(
        led, holder("b", share(4, 10)), holder("c", share(10, 16)), holder("d", share(4, 10)), node("e"), whole
    )
    assert place_shares(view, COUNT, ALL)["e"] == PlacedShare(share(0, 6), leads=False)


def test_whole_nodes_come_before_small_ones() -> None:
    big = node("z", layer_capacity=3)
    assert place_shares(snapshot(big, node("a")), COUNT, ALL) == {}  # it serves all layers by itself
    assert place_shares(snapshot(node("a")), COUNT, (1,)) == {
        "a": PlacedShare(share(0, 4, LayerSpan(1, 2)), leads=True)
    }
    assert place_shares(snapshot(node("a")), 0, ()) == {}


def test_who_cannot_lead_holds_experts_until_somebody_leads() -> None:
    placed = place_shares(snapshot(node("a", lead_room=-1), node("b", lead_room=0)), COUNT, (0,))
    assert placed == {"a": PlacedShare(share(10, 16), leads=False), "b": PlacedShare(share(0, 0), leads=True)}


def test_shares_of_other_counts_and_nodes_that_leave_do_not_count() -> None:
    own = share(0, 4)
    strange = ExpertShare(LayerSpan(0, 1), 0, 8, 8)
    assert missing_experts([0], own, [strange, share(8, 16)]) == {0: ((4, 8),)}
    assert missing_experts([0, 1], own, [share(4, 16, LayerSpan(0, 2))]) == {}
    found = [
        holder("a", share(4, 8)),
        holder("b", share(8, 16), NodeState.DRAINING),
        holder("c", strange),
        leader("d", own),
    ]
    assert [n.peer for n in holders(found, COUNT)] == ["a"]


def test_as_few_as_possible_are_asked() -> None:
    asked, nobody = assign_experts([1, 9, 3, 9, 15], [("a", range(8)), ("b", range(2, 12)), ("c", range(4))])
    assert asked == {"a": [1, 3], "b": [9]}
    assert nobody == [15]
    assert assign_experts([], [("a", range(8))]) == ({}, [])


def test_of_two_that_took_the_same_one_chooses_again() -> None:
    led, one, two = leader("a", share(0, 4)), holder("b", share(4, 10)), holder("c", share(4, 10))
    view = snapshot(led, replace(one, state=NodeState.LOADING), replace(two, state=NodeState.LOADING))
    assert [is_spare(view, view.node(peer) or led, COUNT) for peer in "abc"] == [False, False, True]
    whole = snapshot(led, one, two, holder("d", share(10, 16)))
    assert not is_spare(whole, two, COUNT)  # nothing is missing: it is a replica


def test_bounds() -> None:
    for first, end, count in ((-1, 2, 4), (3, 2, 4), (0, 5, 4), (0, 1, 5000)):
        with pytest.raises(UsageError):
            ExpertShare(LayerSpan(0, 1), first, end, count)


def test_a_trusted_end_must_hold_all_experts_itself() -> None:
    rules = ChainRules(ends=frozenset({"a"}))
    assert not rules.allows(leader("a", share(0, 4)))
    assert rules.allows(leader("a", share(0, COUNT)))
    assert rules.allows(leader("b", share(0, 4)))
    assert rules.allows(node("a", span=LayerSpan(0, 1), state=NodeState.SERVING))
