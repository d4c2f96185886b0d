"""Nodes whose records are all there is of them move nobody, and the views of honest nodes agree in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_swarm import node, snapshot

from swarm.planner.rebalancing.policy import RebalancePolicy
from swarm.planner.rebalancing.rebalancer import Rebalancer
from swarm.planner.trust.doubts import Acquaintance, DoubtPolicy, Doubts, doubts
from swarm.types import Snapshot

POLICY = RebalancePolicy(imbalance_timeout_s=10.0, cooldown_s=60.0)


def moves(seen: Snapshot, of: Doubts, me: str = "a", seconds: int = 60) -> list[int]:
    """When node `me` would move."""
    rebalancer = Rebalancer(me, POLICY)
    return [now for now in range(seconds) if rebalancer.observe(seen, float(now), of).move is not None]


def test_silence_counts_once_somebody_has_answered_and_newness_passes() -> None:
    policy = DoubtPolicy()
    never = Acquaintance(0.0, missed=policy.silent_pings)
    alone = doubts("me", {"x": never, "y": never}, 100.0)
    assert not alone.silent  # it is we who reach nobody
    known = {"x": never, "y": Acquaintance(0.0, answered=True), "z": Acquaintance(90.0), "me": Acquaintance(90.0)}
    assert doubts("me", known, 100.0) == Doubts(frozenset({"z"}), frozenset({"x"}))
    assert doubts("me", known, 90.0 + policy.grace_s) == Doubts(frozenset(), frozenset({"x"}))
    condemned = {"y": Acquaintance(0.0, answered=True, condemned=True)}
    assert doubts("me", condemned, 100.0).silent == {"y"}


def test_invented_nodes_push_nobody_away() -> None:
    honest = [node("x", 10, (0, 10)), node("y", 10, (0, 10)), node("z", 10, (10, 20))]
    claimed = snapshot(20, [*honest, node("a", 10, (0, 10)), node("b", 10, (0, 10))])
    assert any(moves(claimed, Doubts(), me) for me in "xyz")  # they would
    assert not any(moves(claimed, Doubts(new={"a", "b"}), me) for me in "xyz")
    assert not any(moves(claimed, Doubts(silent={"a", "b"}), me) for me in "xyz")


def test_layers_are_not_left_to_nodes_that_are_too_new() -> None:
    crowd = "uvwx"
    lopsided = snapshot(20, [*(node(peer, 10, (0, 10)) for peer in crowd), node("y", 10, (10, 20))])
    movers = [me for me in crowd if moves(lopsided, Doubts(), me)]
    assert movers
    for me in movers:
        assert not moves(lopsided, Doubts(new=set(crowd) - {me}), me)


def test_layers_that_only_silent_nodes_claim_are_a_gap() -> None:
    claimed = snapshot(20, [node("a", 10, (0, 10)), node("b", 10, (0, 10)), node("x", 10, (10, 20))])
    assert not any(moves(claimed, Doubts(), me) for me in "ab")
    moved = {me: moves(claimed, Doubts(silent={"x"}), me) for me in "ab"}
    assert sum(bool(times) for times in moved.values()) == 1  # one fills it, and the other stays
    assert min(t for times in moved.values() for t in times) <= POLICY.coverage_timeout_s + POLICY.stability_s + 1


@pytest.mark.parametrize("seconds", [300])
def test_nodes_that_disagree_about_a_third_do_not_move_for_ever(seconds: int) -> None:
    """`b` is answered by the node that `a` calls silent."""
    seen = {n.peer: n for n in (node("a", 10, (0, 10)), node("b", 10, (0, 10)), node("x", 10, (10, 20)))}
    views = {"a": Doubts(silent={"x"}), "b": Doubts()}
    rebalancers = {me: Rebalancer(me, POLICY) for me in views}
    total = 0
    for now in range(seconds):
        for me, rebalancer in rebalancers.items():
            move = rebalancer.observe(snapshot(20, seen.values()), float(now), views[me]).move
            if move is not None:
                rebalancer.moved(float(now))
                seen[me] = replace(seen[me], span=move.new)
                total += 1
    assert total <= 2
