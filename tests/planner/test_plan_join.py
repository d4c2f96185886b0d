"""Joining, leaving, rebalancing: rules, and brute force on small cases."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from toy_swarm import node, snapshot

from swarm.errors import Infeasible, UsageError
from swarm.planner.cli.commands import COMMANDS
from swarm.planner.placement.join import join_span, place_joiners, uncovered_without
from swarm.planner.rebalancing.assignment import min_cost_assignment
from swarm.planner.rebalancing.imbalance import LayerLoad, load_imbalance
from swarm.planner.rebalancing.migration import SpanMove, layers_to_load, list_moves, migration_plan, relabel_equivalent
from swarm.planner.rebalancing.target import target_allocation
from swarm.planner.schemas import placement_request_json
from swarm.types import LayerSpan, NodeState, coverage

VERB = {verb.name: verb for verb in COMMANDS}


def spans_of(placed: dict[str, LayerSpan]) -> dict[str, str]:
    return {peer: str(span) for peer, span in placed.items()}


# Joining ------------------------------------------------------------------------------------------------------------


def test_a_node_joins_at_the_lowest_bottleneck_and_takes_what_it_can() -> None:
    assert join_span([9, 4, 7, 4, 9, 9], 3) == LayerSpan(1, 4)
    assert join_span([0, 0, 0, 0], 2) == LayerSpan(0, 2)
    assert join_span([5, 5, 5, 1], 3) == LayerSpan(3, 4)
    assert join_span([5, 5, 5, 1], 3, slide=True) == LayerSpan(1, 4)
    assert join_span([5, 5, 5, 1], 9, slide=True) == LayerSpan(0, 4)


@pytest.mark.parametrize(("tokens", "capacity"), [([], 3), ([1.0], 0), ([1.0], -1)])
def test_a_join_without_layers_or_room_is_refused(tokens: list[float], capacity: int) -> None:
    with pytest.raises(UsageError):
        join_span(tokens, capacity)


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        ((12, 12, 12), ("0:10", "10:20", "20:30")),  # all three are needed: even shares
        ((30, 30, 30), ("0:30", "0:30", "0:30")),  # one is enough: three replicas
        ((15, 15, 15), ("0:15", "15:30", "0:15")),  # two are needed, the third joins at the bottleneck
        ((5, 6, 7), ("0:5", "5:11", "11:18")),  # too few: all they can
        ((10, 20, 30), ("0:10", "10:30", "0:30")),  # the one that holds it all, then the bottleneck
    ],
)
def test_nodes_that_join_together_split_the_model(capacities: tuple[int, ...], expected: tuple[str, ...]) -> None:
    joining = snapshot(30, (node(f"p{i}", c) for i, c in enumerate(capacities)))
    assert tuple(spans_of(place_joiners(joining)).values()) != ()
    assert tuple(str(place_joiners(joining)[f"p{i}"]) for i in range(len(capacities))) == expected


def test_shares_follow_speed() -> None:
    placed = place_joiners(snapshot(12, [node("a", 9, ms=1.0), node("b", 9, ms=3.0)]))
    assert spans_of(placed) == {"a": "0:9", "b": "9:12"}


def test_joiners_fill_the_gaps_others_leave() -> None:
    held = [node("s", 10, (0, 10)), node("t", 10, (20, 25), state=NodeState.LOADING)]
    gone = node("d", 10, (10, 20), state=NodeState.DRAINING)
    placed = place_joiners(snapshot(30, [*held, gone, node("a", 6), node("b", 6), node("c", 5)]))
    assert sorted(spans_of(placed).values()) == ["10:15", "15:20", "25:30"]
    one = place_joiners(snapshot(30, [*held, gone, node("a", 20)]))
    assert spans_of(one) == {"a": "10:30"}


def test_a_joiner_that_bridges_two_gaps_takes_both() -> None:
    held = [node("s", 10, (0, 3)), node("t", 10, (5, 7)), node("u", 10, (9, 12))]
    assert spans_of(place_joiners(snapshot(12, [*held, node("a", 6)]))) == {"a": "3:9"}


def test_every_joiner_is_placed_and_what_can_be_covered_is() -> None:
    rng = random.Random(1)
    for _ in range(1500):
        num_layers = rng.randint(1, 24)
        capacities = [rng.randint(1, num_layers + 2) for _ in range(rng.randint(1, 6))]
        joining = [node(f"p{i}", c, ms=rng.choice([0.5, 1, 4])) for i, c in enumerate(capacities)]
        start = rng.randrange(num_layers)
        held = [node("s", 24, (start, rng.randint(start + 1, num_layers)))] if rng.random() < 0.5 else []
        placed = place_joiners(snapshot(num_layers, [*joining, *held]))
        assert set(placed) == {n.peer for n in joining}
        for joiner in joining:
            assert 1 <= len(placed[joiner.peer]) <= min(joiner.layer_capacity, num_layers)
            assert placed[joiner.peer].end <= num_layers
        covered = coverage([*placed.values(), *(n.span for n in held if n.span)], num_layers)
        if not held and sum(capacities) >= num_layers:
            assert min(covered) >= 1


def test_leaving_uncovers_what_nobody_else_serves() -> None:
    swarm = snapshot(12, [node("a", 8, (0, 8)), node("b", 8, (4, 12)), node("c", 2, (8, 10))])
    assert uncovered_without(swarm, {"a"}) == ((0, 4),)
    assert uncovered_without(swarm, {"b"}) == ((10, 12),)
    assert uncovered_without(swarm, {"c"}) == ()
    assert uncovered_without(snapshot(4, [node("a", 2, (0, 2))]), {"a"}) == ((0, 2),)


# Triggers -----------------------------------------------------------------------------------------------------------


def test_the_load_of_a_layer_is_the_papers() -> None:
    verdict = load_imbalance([LayerLoad(10, 1), LayerLoad(30, 3)], 40, 4, alpha=0.5, threshold=0.6)
    assert verdict.cv == pytest.approx(0.5)  # loads 1/4 and 3/4
    assert not verdict.rebalance
    assert verdict.reason.startswith("balanced")
    memory = load_imbalance([LayerLoad(10, 3), LayerLoad(30, 1)], 40, 4, alpha=1.0, threshold=0.4)
    assert memory.cv == pytest.approx(0.5)
    assert memory.rebalance
    assert memory.reason.startswith("imbalance")
    assert load_imbalance([LayerLoad(10, 3), LayerLoad(30, 1)], 40, 4, alpha=0.5).cv == pytest.approx(0.0)


def test_an_uncovered_layer_triggers_whatever_the_threshold() -> None:
    verdict = load_imbalance([LayerLoad(1, 1), LayerLoad(0, 0), LayerLoad(0, 0)], 1, 1, threshold=9.0)
    assert verdict.rebalance
    assert verdict.reason == "coverage: nobody serves layers 1:3"
    empty = load_imbalance([LayerLoad(0, 0)], 0, 0)
    assert (empty.cv, empty.rebalance) == (0.0, True)


def test_invalid_loads_are_refused() -> None:
    nonsense = [LayerLoad(1, float("nan"))]
    for layers, alpha in (([], 0.5), ([LayerLoad(-1, 0)], 0.5), (nonsense, 0.5), ([LayerLoad(1, 1)], 2)):
        with pytest.raises(UsageError):
            load_imbalance(layers, 1, 1, alpha)


# Moves --------------------------------------------------------------------------------------------------------------


def test_assignment_is_the_cheapest() -> None:
    rng = random.Random(2)
    for _ in range(1000):
        n = rng.randint(1, 6)
        cost = np.array([[rng.randint(0, 9) for _ in range(n)] for _ in range(n)])
        places = min_cost_assignment(cost)
        assert sorted(places) == list(range(n))
        best = min(sum(cost[i, p] for i, p in enumerate(order)) for order in itertools.permutations(range(n)))
        assert sum(cost[i, p] for i, p in enumerate(places)) == best


def random_span(rng: random.Random, num_layers: int, longest: int) -> LayerSpan:
    length = rng.randint(1, min(longest, num_layers))
    start = rng.randint(0, num_layers - length)
    return LayerSpan(start, start + length)


def cost_of_deal(old: dict[str, LayerSpan], peers: list[str], order: Iterable[LayerSpan | None]) -> tuple[int, int]:
    pairs = [(old.get(p), s) for p, s in zip(peers, order, strict=True) if s is not None]
    return sum(layers_to_load(a, b) for a, b in pairs), sum(a != b for a, b in pairs)


def test_relabeling_loads_the_fewest_layers_then_moves_the_fewest_nodes() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        num_layers = rng.randint(2, 12)
        peers = [f"p{i}" for i in range(rng.randint(1, 5))]
        old = {p: random_span(rng, num_layers, 8) for p in peers if rng.random() < 0.8}
        new = {p: random_span(rng, num_layers, 8) if rng.random() < 0.8 else None for p in peers}
        capacity = {p: max(len(new[p] or ()), len(old.get(p, ())), rng.randint(1, 8)) for p in peers}

        deals = [
            cost_of_deal(old, peers, order)
            for order in itertools.permutations(new.values())
            if all(s is None or len(s) <= capacity[p] for p, s in zip(peers, order, strict=True))
        ]
        dealt = relabel_equivalent(old, new, dict.fromkeys(peers, 0), capacity)
        changed = [(old.get(p), s) for p, s in dealt.items() if old.get(p) != s]
        assert (sum(layers_to_load(a, b) for a, b in changed), len(changed)) == min(deals)


def test_no_layer_is_ever_uncovered_on_the_way() -> None:
    rng = random.Random(4)
    moved = held_back = 0
    for _ in range(600):
        num_layers = rng.randint(2, 12)
        capacity = {f"p{i}": rng.randint(1, num_layers) for i in range(rng.randint(2, 8))}
        old = {p: random_span(rng, num_layers, c) for p, c in capacity.items() if rng.random() < 0.9}
        new = {p: random_span(rng, num_layers, c) for p, c in capacity.items()}
        moves = list_moves(old, new, capacity)
        plan = migration_plan(old, moves, num_layers)
        assert sorted(m.peer for wave in plan.waves for m in wave) == sorted(
            {m.peer for m in moves} - {m.peer for m in plan.held_back}
        )
        before = np.array(coverage(old.values(), num_layers))
        serving: dict[str, list[LayerSpan]] = {p: [s] for p, s in old.items()}
        for wave in plan.waves:
            for phase in ("reading", "done"):
                for move in wave:
                    if phase == "done":
                        serving[move.peer] = [move.new]
                    elif not move.overlap:
                        serving[move.peer] = []
                    elif move.old:
                        assert len(set(move.old) | set(move.new)) <= capacity[move.peer]
                now = coverage((s for spans in serving.values() for s in spans), num_layers)
                if before.min() > 0:
                    assert min(now) > 0
            moved += len(wave)
        held_back += len(plan.held_back)
    assert moved > 500
    assert held_back > 50


def test_a_node_with_room_for_both_makes_before_it_breaks() -> None:
    old = {"a": LayerSpan(0, 6), "b": LayerSpan(6, 12)}
    new = {"a": LayerSpan(0, 8), "b": LayerSpan(8, 12)}
    roomy = migration_plan(old, list_moves(old, new, {"a": 8, "b": 6}), 12)
    assert roomy.waves == (
        (SpanMove("a", LayerSpan(0, 6), LayerSpan(0, 8), overlap=True),),
        (SpanMove("b", LayerSpan(6, 12), LayerSpan(8, 12), overlap=True),),
    )
    swapped = {"a": LayerSpan(6, 12), "b": LayerSpan(0, 6)}
    assert [m.peer for m in migration_plan(old, list_moves(old, swapped, {"a": 6, "b": 6}), 12).held_back] == ["a", "b"]


# Targets ------------------------------------------------------------------------------------------------------------


def test_a_target_fills_the_gap_with_a_redundant_node() -> None:
    swarm = snapshot(30, [node("a", 15, (0, 15)), node("b", 15, (0, 15)), node("c", 15, (0, 15))])
    aim = target_allocation(swarm)
    assert min(coverage(aim.spans.values(), 30)) >= 1
    assert sum(len(wave) for wave in aim.plan.waves) == 1
    assert aim.before.rebalance
    assert not aim.after.reason.startswith("coverage")


def test_a_balanced_swarm_has_no_moves() -> None:
    placed = [node(f"p{i}", 10, (10 * (i % 3), 10 * (i % 3) + 10)) for i in (4, 2, 0, 5, 1, 3)]
    assert target_allocation(snapshot(30, placed)).plan.waves == ()


def test_pinned_nodes_stay_and_the_others_go_round_them() -> None:
    swarm = snapshot(30, [node("a", 15, (0, 15), pinned=True), node("b", 15, (0, 15)), node("c", 4, (0, 4))])
    aim = target_allocation(swarm)
    assert aim.spans["a"] == LayerSpan(0, 15)
    assert aim.spans["b"] == LayerSpan(15, 30)
    with pytest.raises(Infeasible, match="cannot hold"):
        target_allocation(snapshot(30, [node("a", 15, (0, 15), pinned=True), node("b", 5, (0, 5))]))


def test_every_reader_of_a_snapshot_gets_the_same_target() -> None:
    rng = random.Random(6)
    for _ in range(40):
        num_layers = rng.randint(6, 30)
        members = []
        for i in range(rng.randint(2, 9)):
            capacity = rng.randint(2, num_layers)
            span = random_span(rng, num_layers, capacity)
            kind = (span.start, span.end) if rng.random() < 0.9 else None
            members.append(node(f"p{i}", capacity, kind, ms=rng.uniform(0.5, 4), kv=rng.randint(0, 900)))
        try:
            one = target_allocation(snapshot(num_layers, members))
        except Infeasible:
            continue
        rng.shuffle(members)
        noisy = [replace(n, layer_ms=(9.0,) * len(n.span or ()), kv_free_tokens=3) for n in members]
        assert target_allocation(snapshot(num_layers, noisy)) == one
        capacity = {n.peer: n.layer_capacity for n in members}
        assert all(len(span) <= capacity[peer] for peer, span in one.spans.items())
        assert min(coverage(one.spans.values(), num_layers)) >= 1


def test_swarm_plan_reproduces_a_decision_from_its_snapshot() -> None:
    rng = random.Random(11)
    for _ in range(60):
        num_layers = rng.randint(2, 12)
        nodes = []
        for i in range(rng.randint(1, 6)):
            span = random_span(rng, num_layers, num_layers) if rng.random() < 0.7 else None
            nodes.append(
                node(
                    f"n{i}",
                    rng.randint(len(span) if span else 1, num_layers),
                    (span.start, span.end) if span else None,
                    ms=rng.choice([0.5, 1.0, 2.25]),
                    kv=rng.choice([0, 100, 300]),
                    pinned=rng.random() < 0.2,
                )
            )
        seen = snapshot(num_layers, nodes)
        said = VERB["place-all"].run(json.dumps(placement_request_json(seen)).encode()).fields
        placed = {joiner["node"]: LayerSpan(joiner["start"], joiner["end"]) for joiner in said["joiners"]}
        assert placed == place_joiners(seen)
        try:
            waves = target_allocation(seen).plan.waves
        except Infeasible:
            waves = ()
        assert [[(m["node"], *m["to"]) for m in wave] for wave in said["waves"]] == [
            [(m.peer, m.new.start, m.new.end) for m in wave] for wave in waves
        ]
