"""Rebalancers: a swarm of them in virtual time heals and evens out, under churn too, and does not thrash."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from toy_swarm import node, snapshot

from swarm.planner.rebalancing.policy import RebalancePolicy
from swarm.planner.rebalancing.rebalancer import Rebalancer
from swarm.types import NodeProfile, NodeState, Snapshot, coverage

POLICY = RebalancePolicy(imbalance_timeout_s=10.0, cooldown_s=60.0)


class VirtualSwarm:
    """Nodes with rebalancers; each sees the swarm a little late, and loads weights for a while when it moves."""

    LOADING_S = 5.0

    def __init__(self, num_layers: int, nodes: Iterable[NodeProfile], rng: random.Random) -> None:
        self.num_layers, self.rng, self.now = num_layers, rng, 0.0
        self.nodes = {n.peer: n for n in nodes}
        self.rebalancers = {peer: Rebalancer(peer, POLICY) for peer in self.nodes}
        self.ready: dict[str, float] = {}
        self.moves = 0
        self.seen = [self.view()] * 3

    def view(self) -> Snapshot:
        return snapshot(self.num_layers, self.nodes.values())

    def covered(self) -> bool:
        return min(self.view().coverage()) > 0

    def held(self) -> bool:
        """Every layer is served or being loaded."""
        return min(coverage((n.span for n in self.nodes.values() if n.span), self.num_layers)) > 0

    def run(self, seconds: int, churn: Callable[[], object] = lambda: None) -> None:
        for _ in range(seconds):
            self.now += 1.0
            churn()
            for peer, at in list(self.ready.items()):
                if self.now >= at:
                    self.nodes[peer] = replace(self.nodes[peer], state=NodeState.SERVING)
                    del self.ready[peer]
            self.seen = [*self.seen[1:], self.view()]
            whole = self.covered()
            for peer in self.rng.sample(sorted(self.rebalancers), len(self.rebalancers)):
                late = self.rng.choice(self.seen[-2:])
                decision = self.rebalancers[peer].observe(late, self.now)
                assert decision.reason
                if decision.move is not None:
                    self.rebalancers[peer].moved(self.now)
                    self.nodes[peer] = replace(self.nodes[peer], span=decision.move.new, state=NodeState.LOADING)
                    self.ready[peer] = self.now + self.LOADING_S
                    self.moves += 1
            if whole:
                assert self.covered(), "a move uncovered a layer"

    def leave(self, peer: str) -> None:
        del self.nodes[peer], self.rebalancers[peer]
        self.ready.pop(peer, None)

    def join(self, node: NodeProfile) -> None:
        self.nodes[node.peer] = node
        self.rebalancers[node.peer] = Rebalancer(node.peer, POLICY)

    def transients(self, span: tuple[int, int], capacity: int) -> Iterator[None]:
        """Every second one joins and one leaves: never the same swarm twice. All serve `span`."""
        for number in itertools.count():
            self.join(node(f"x{number:03d}", capacity, span))
            if number >= 3:
                self.leave(f"x{number - 3:03d}")
            yield


def test_rebalancers_heal_a_swarm_without_thrashing() -> None:
    rng = random.Random(7)
    swarm = VirtualSwarm(30, three_by_three(), rng)
    swarm.run(60)
    assert swarm.moves == 0
    for peer in ("p2", "p5", "p8"):  # all that serve 20:30
        swarm.leave(peer)
    assert not swarm.covered()
    swarm.run(60)
    assert swarm.covered()
    healing = swarm.moves
    assert 1 <= healing <= 4
    swarm.run(200)
    assert swarm.moves - healing <= 2


def test_rebalancers_even_out_a_lopsided_swarm_and_then_rest() -> None:
    nodes = [node(f"p{i}", 10, (0, 10) if i < 7 else (10, 20)) for i in range(8)]
    swarm = VirtualSwarm(20, nodes, random.Random(8))
    swarm.run(150)
    assert sorted(swarm.view().coverage()) == [4] * 20
    assert swarm.moves == 3
    swarm.run(150)
    assert swarm.moves == 3


def test_a_rebalancer_leaves_pinned_and_loading_nodes_alone() -> None:
    nodes = [node("a", 10, (0, 10)), node("b", 10, (0, 10), pinned=True), node("c", 10, (0, 10))]
    lopsided = snapshot(20, nodes)
    rebalancer = Rebalancer("b")
    for second in range(100):
        assert rebalancer.observe(lopsided, float(second)).move is None
    decisions = [Rebalancer("a"), Rebalancer("c")]
    moves = []
    for second in range(10):
        moves += [d for r in decisions if (d := r.observe(lopsided, float(second)).move)]
    assert {m.peer for m in moves} == {"a"} or {m.peer for m in moves} == {"c"}
    joining = snapshot(20, [*nodes, node("d", 10)])
    assert Rebalancer("a").observe(joining, 0.0).move is None  # the joiner will fill the gap


def three_by_three() -> list[NodeProfile]:
    return [node(f"p{i}", 12, (10 * (i % 3), 10 * (i % 3) + 10)) for i in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("capacity", [3, 12])
def test_a_gap_that_lasts_is_filled_whatever_else_goes_on(seed: int, capacity: int) -> None:
    swarm = VirtualSwarm(30, three_by_three(), random.Random(seed))
    transients = swarm.transients((0, 3), capacity)
    swarm.run(40, lambda: next(transients))
    before = swarm.moves
    for peer in ("p2", "p5", "p8"):  # all that serve 20:30
        swarm.leave(peer)
    timeout_s = 2 * POLICY.coverage_timeout_s
    swarm.run(round(timeout_s) + 2, lambda: next(transients))  # snapshots are up to two seconds old
    assert swarm.held()
    filled = swarm.moves
    assert filled > before
    swarm.run(60, lambda: next(transients))
    assert swarm.moves - filled <= 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_an_imbalance_that_lasts_is_evened_out_whatever_else_goes_on(seed: int) -> None:
    swarm = VirtualSwarm(20, [node(f"p{i}", 10, (0, 10) if i < 7 else (10, 20)) for i in range(8)], random.Random(seed))
    transients = swarm.transients((0, 1), 1)
    swarm.run(round(POLICY.imbalance_timeout_s) + 25, lambda: next(transients))
    assert min(swarm.view().coverage()) >= 3
    moved = swarm.moves
    swarm.run(60, lambda: next(transients))
    assert swarm.moves - moved <= 2


@pytest.mark.parametrize(("away_s", "back_s"), [(4, 2), (4, 4), (5, 20)])
def test_a_gap_shorter_than_the_timeout_moves_nobody(away_s: int, back_s: int) -> None:
    swarm = VirtualSwarm(30, three_by_three()[:5], random.Random(1))
    for _ in range(20):
        gone = swarm.nodes["p2"]
        swarm.leave("p2")
        swarm.run(away_s)
        swarm.join(gone)
        swarm.run(back_s)
    assert swarm.moves == 0


@pytest.mark.parametrize("away_s", [8, 14, 25])
def test_a_node_that_flaps_is_replaced_once(away_s: int) -> None:
    swarm = VirtualSwarm(30, three_by_three()[:5], random.Random(2))
    for _ in range(20):
        gone = swarm.nodes["p2"]
        swarm.leave("p2")
        swarm.run(away_s)
        swarm.join(gone)
        swarm.run(away_s)
    assert 1 <= swarm.moves <= 2


def test_two_nodes_that_flap_in_turn_do_not_drag_a_third_to_and_fro() -> None:
    """One spare node, two gaps that take turns: its timeout grows with its moves."""
    swarm = VirtualSwarm(30, [node(f"p{i}", 10, (10 * i, 10 * i + 10)) for i in range(3)], random.Random(3))
    swarm.join(node("q", 10, (10, 20)))
    for turn in range(30):
        gone = swarm.nodes["p0" if turn % 2 else "p2"]
        swarm.leave(gone.peer)
        swarm.run(9)
        swarm.join(gone)
        swarm.run(9)
    assert 1 <= swarm.moves <= 10


def test_a_gap_that_leaving_nodes_announce_is_filled_soon_and_however_often_the_node_has_moved() -> None:
    a, b, c = node("a", 4, (0, 4)), node("b", 4, (0, 4)), node("c", 4, (4, 8))
    leaving, gone = snapshot(8, [a, b, replace(c, state=NodeState.LEAVING)]), snapshot(8, [a, b])
    waits = {}
    for name, seen in (("leaving", leaving), ("gone", gone)):
        rebalancers = {peer: Rebalancer(peer, POLICY) for peer in ("a", "b")}
        for rebalancer in rebalancers.values():
            rebalancer.observe(snapshot(8, [a, b, c]), -20.0)
            rebalancer.moved(-10.0)
        waits[name] = next(
            now for now in range(60) if any(r.observe(seen, float(now)).move is not None for r in rebalancers.values())
        )
    assert waits["leaving"] <= 2 * POLICY.stability_s
    assert waits["gone"] >= POLICY.imbalance_timeout_s


def test_nobody_moves_for_a_gap_that_a_joining_node_is_about_to_fill_unless_it_never_does() -> None:
    placed = [node("a", 10, (0, 10)), node("b", 10, (0, 10)), node("c", 10, (0, 10))]
    promised = snapshot(20, [*placed, node("d", 10)])
    rebalancers = [Rebalancer(peer, POLICY) for peer in "abc"]
    moved = [s for s in range(40) for rebalancer in rebalancers if rebalancer.observe(promised, float(s)).move]
    assert moved
    assert moved[0] == POLICY.imbalance_timeout_s + POLICY.stability_s
