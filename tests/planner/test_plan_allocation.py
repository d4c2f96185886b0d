"""Phase 1 against exhaustive search on small pools, and against its own bounds on large ones."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import Infeasible, UsageError
from swarm.planner.placement.allocation import Allocation, Objective, allocate
from swarm.planner.placement.bounds import Dual, at_most, rounding_dual_rows
from swarm.planner.placement.column_generation import Relaxation, cover_costs
from swarm.planner.placement.exact_dp import decide
from swarm.planner.placement.greedy import form, match_pairs, trim
from swarm.planner.placement.min_nodes import MinNodesByReplicas
from swarm.planner.placement.water_filling import PoolNode
from swarm.planner.placement.work_budget import WorkBudget

PRICE = Objective(compute_ms=100.0, hop_ms=10.0)
PLENTY = 10**9


def pool(*capacities: int, region: str = "") -> list[PoolNode]:
    return [PoolNode(f"n{i:04}", c, compute=1.0 + i % 3, region=region) for i, c in enumerate(capacities)]


def fewest_stages(capacities: list[int], num_layers: int) -> dict[int, int]:
    """s*(k) for each feasible k: the most replicas of every subset, by trying every replica its lowest member is in."""
    held = [sum(c for i, c in enumerate(capacities) if m >> i & 1) for m in range(1 << len(capacities))]

    @cache
    def most(members: int) -> int:
        if held[members] < num_layers:
            return 0
        lowest = members & -members
        others = members ^ lowest
        best, mates = most(others), others
        while True:
            if held[mates | lowest] >= num_layers:
                best = max(best, 1 + most(others ^ mates))
            if not mates:
                return best
            mates = (mates - 1) & others

    fewest: dict[int, int] = {}
    for members in range(1 << len(capacities)):
        for k in range(1, most(members) + 1):
            fewest[k] = min(fewest.get(k, len(capacities)), members.bit_count())
    return fewest


def check_plan(answer: Allocation, num_layers: int, nodes: list[PoolNode]) -> None:
    """Everything a plan must satisfy whether or not it is the best."""
    capacity = {node.id: node.layer_capacity for node in nodes}
    used = [hop.peer for replica in answer.replicas for hop in replica]
    assert len(set(used)) == len(used)
    assert sorted([*used, *answer.unused]) == sorted(capacity)
    assert len(answer.replicas) == answer.best_k
    assert len(used) == answer.stages_by_k[answer.best_k]
    for replica in answer.replicas:
        assert [hop.start for hop in replica] == [0, *(hop.end for hop in replica[:-1])]
        assert replica[-1].end == num_layers
        assert all(0 < hop.end - hop.start <= capacity[hop.peer] for hop in replica)
    assert answer.stages_by_k.keys() == answer.gap_by_k.keys()
    assert answer.score <= answer.score_bound


def drawn_pool(rng: random.Random, most_nodes: int = 8) -> tuple[list[int], int, Objective]:
    num_layers = rng.randint(1, 24)
    largest = rng.randint(1, num_layers + 3)
    capacities = [rng.randint(0, largest) for _ in range(rng.randint(1, most_nodes))]
    alpha = rng.choice([0.2, 0.5, 1.0, 2.0])
    return capacities, num_layers, Objective(rng.choice([0.0, 1.0, 100.0]), rng.choice([0.1, 5.0, 20.0]), alpha)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_small_pools_are_solved_as_exhaustive_search_solves_them(seed: int) -> None:
    rng = random.Random(seed)
    solved = 0
    while solved < 400:
        capacities, num_layers, price = drawn_pool(rng)
        if sum(capacities) < num_layers:
            continue
        nodes = pool(*capacities)
        answer = allocate(num_layers, nodes, price)
        fewest = fewest_stages(capacities, num_layers)
        assert dict(answer.stages_by_k) == fewest
        assert answer.exact
        assert set(answer.gap_by_k.values()) == {0}
        assert answer.gap == 0.0
        scores = {k: price.score(k, stages) for k, stages in fewest.items()}
        assert answer.score == pytest.approx(max(scores.values()), rel=1e-9)
        ties = [k for k, score in scores.items() if score >= max(scores.values()) * (1 - 1e-9)]
        assert answer.best_k == min(ties, key=lambda k: fewest[k])
        check_plan(answer, num_layers, nodes)
        solved += 1


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 25))
def test_random_pools_are_solved_exactly(capacities: list[int], num_layers: int) -> None:
    nodes = pool(*capacities)
    if sum(capacities) < num_layers:
        with pytest.raises(Infeasible, match=f"{num_layers - sum(capacities)} layers of memory are missing"):
            allocate(num_layers, nodes, PRICE)
        return
    answer = allocate(num_layers, nodes, PRICE)
    assert dict(answer.stages_by_k) == fewest_stages(capacities, num_layers)
    check_plan(answer, num_layers, nodes)


@pytest.mark.parametrize("kinds", [[10], [8, 20], [6, 10, 16, 32], range(2, 21), range(4, 41), range(1, 81)])
def test_pools_of_64_are_proven_optimal(kinds: list[int]) -> None:
    rng = random.Random(64)
    for _ in range(3):
        nodes = pool(*rng.choices(kinds, k=64))
        answer = allocate(64, nodes, PRICE, WorkBudget(10**6))
        assert answer.exact
        assert set(answer.gap_by_k.values()) == {0}
        check_plan(answer, 64, nodes)


@pytest.mark.parametrize("steps", [0, 100, 1500])
def test_out_of_budget_the_plan_is_greedy_and_its_bounds_hold(steps: int) -> None:
    rng = random.Random(steps)
    greedy = 0
    for _ in range(12):
        nodes = pool(*(rng.randint(4, 40) for _ in range(48)))
        best = allocate(64, nodes, PRICE, WorkBudget(10**6))
        assert best.exact
        quick = allocate(64, nodes, PRICE, WorkBudget(steps))
        check_plan(quick, 64, nodes)
        greedy += not quick.exact
        assert quick.score * (1 + quick.gap) >= best.score * (1 - 1e-12)
        for k, stages in quick.stages_by_k.items():
            assert stages - quick.gap_by_k[k] <= best.stages_by_k[k] <= stages
    assert greedy or steps > 1000


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(UsageError):
        WorkBudget(-1)


def test_a_share_of_a_budget_is_spent_from_the_whole() -> None:
    whole = WorkBudget(100)
    half = whole.share(0.5)
    assert half.spend(40)
    assert not half.spend(10)
    assert whole.spend(49)
    assert not whole.spend(1)
    assert whole.share(0.5).spent


def test_the_order_of_the_nodes_does_not_matter() -> None:
    rng = random.Random(5)
    nodes = [PoolNode(f"n{i:03}", rng.randint(4, 40), rng.random() + 0.1, rng.choice("ab")) for i in range(60)]
    answer = allocate(64, nodes, PRICE)
    for _ in range(3):
        rng.shuffle(nodes)
        assert allocate(64, nodes, PRICE) == answer


def test_of_equal_nodes_the_lower_ids_serve() -> None:
    answer = allocate(10, [PoolNode(name, 5, 1.0) for name in "edcba"], PRICE)
    assert answer.best_k == 2
    assert answer.unused == ("e",)
    assert [[hop.peer for hop in replica] for replica in answer.replicas] == [["a", "b"], ["c", "d"]]


def test_equal_scores_go_to_fewer_stages() -> None:
    # Two replicas of one node each and three that need four nodes score the same with these prices.
    price = Objective(compute_ms=1.0, hop_ms=1.0, alpha=float(np.log(7 / 6) / np.log(3 / 2)))
    answer = allocate(4, pool(4, 4, 2, 2), price)
    assert dict(answer.stages_by_k) == {1: 1, 2: 2, 3: 4}
    assert price.score(3, 4) == pytest.approx(price.score(2, 2), rel=1e-12)
    assert answer.best_k == 2
    assert answer.exact


def test_layers_follow_compute() -> None:
    nodes = [PoolNode("a", 8, compute=1.0), PoolNode("b", 8, compute=3.0)]
    (balanced,) = allocate(8 + 1, nodes, PRICE).replicas
    assert [hop.end - hop.start for hop in balanced] == [2, 7]


def test_replicas_stay_within_a_region_that_can_hold_them() -> None:
    nodes = [PoolNode(f"{r}{i}", 5, 1.0, region=r) for r in ("eu", "us") for i in range(3)]
    answer = allocate(10, nodes, PRICE)
    # Each region forms one replica and has a node to spare; the spare ones form a third across regions.
    assert dict(answer.stages_by_k) == {1: 2, 2: 4, 3: 6}
    regions = [{hop.peer[:2] for hop in replica} for replica in answer.replicas]
    assert sorted(map(sorted, regions)) == [["eu"], ["eu", "us"], ["us"]]
    assert answer.exact


def test_regions_too_small_alone_are_pooled() -> None:
    nodes = [PoolNode(f"n{r}", 4, 1.0, region=f"r{r}") for r in range(3)]
    answer = allocate(10, nodes, PRICE)
    assert answer.best_k == 1
    check_plan(answer, 10, nodes)
    with pytest.raises(Infeasible, match="3 layers of memory are missing"):
        allocate(15, nodes, PRICE)


@pytest.mark.parametrize("seed", range(2))
def test_regions_are_combined_in_the_best_way(seed: int) -> None:
    rng = random.Random(seed)
    checked = 0
    while checked < 60:
        num_layers = rng.randint(4, 16)
        by_region = [[rng.randint(1, num_layers) for _ in range(rng.randint(1, 6))] for _ in range(2)]
        if sum(map(sum, by_region)) < num_layers:
            continue
        nodes = [
            PoolNode(f"{r}{i}", c, 1.0, region=str(r)) for r, caps in enumerate(by_region) for i, c in enumerate(caps)
        ]
        answer = allocate(num_layers, nodes, PRICE)
        check_plan(answer, num_layers, nodes)
        fewest = [{0: 0} | fewest_stages(caps, num_layers) for caps in by_region]
        within: dict[int, int] = {}
        for (i, a), (j, b) in itertools.product(fewest[0].items(), fewest[1].items()):
            within[i + j] = min(within.get(i + j, a + b), a + b)
        del within[0]
        assert {k: s for k, s in answer.stages_by_k.items() if k in within} == within
        assert answer.exact
        checked += 1


def test_bounds_hold_across_regions_when_the_budget_runs_out() -> None:
    rng = random.Random(21)
    for _ in range(10):
        nodes = [PoolNode(f"n{i}", rng.randint(4, 40), 1.0, region=rng.choice("abc")) for i in range(40)]
        best = allocate(64, nodes, PRICE, WorkBudget(10**6))
        for steps in (0, 200, 2000):
            quick = allocate(64, nodes, PRICE, WorkBudget(steps))
            check_plan(quick, 64, nodes)
            assert quick.score_bound >= best.score * (1 - 1e-12)


@pytest.mark.parametrize(
    ("compute_ms", "hop_ms", "alpha"),
    [(0, 0, 1), (-1, 1, 1), (1, -1, 1), (float("nan"), 1, 1), (1, 1, 0), (1e31, 1, 1), (1, 1, 41)],
)
def test_invalid_objectives_are_refused(compute_ms: float, hop_ms: float, alpha: float) -> None:
    with pytest.raises(UsageError):
        Objective(compute_ms, hop_ms, alpha)


def test_invalid_pools_are_refused() -> None:
    with pytest.raises(UsageError, match="same id"):
        allocate(2, [PoolNode("a", 2, 1.0), PoolNode("a", 2, 1.0)], PRICE)
    with pytest.raises(UsageError, match="num_layers"):
        allocate(0, pool(2), PRICE)
    with pytest.raises(Infeasible, match="0 nodes hold 0 of 4 layers"):
        allocate(4, [], PRICE)


def least_weight(dual: Dual, capacities: range, num_layers: int) -> int:
    """The least weight of any capacities, as often as wanted, that reach `num_layers`."""
    sizes = np.array(sorted(capacities, reverse=True))
    left_after = np.maximum(np.arange(num_layers + 1)[:, None] - sizes, 0)
    return int(cover_costs(np.array(dual.weights)[sizes], left_after)[0][-1])


@pytest.mark.parametrize("num_layers", [1, 2, 7, 24, 61, 64, 126])
def test_rounding_duals_weigh_every_replica_enough(num_layers: int) -> None:
    for dual in rounding_dual_rows([num_layers], num_layers, 1, most=10**6):
        assert least_weight(dual, range(1, num_layers + 1), num_layers) >= dual.total > 0


def test_bounds_never_rule_out_what_exists() -> None:
    rng = random.Random(11)
    for _ in range(300):
        capacities, num_layers, _ = drawn_pool(rng, 7)
        capacities = sorted((min(c, num_layers) for c in capacities if c), reverse=True)
        if not capacities:
            continue
        bounds = at_most(capacities, num_layers)
        for k, stages in fewest_stages(capacities, num_layers).items():
            assert bounds[stages - 1] >= k


def test_relaxations_prove_or_find() -> None:
    rng = random.Random(12)
    outcomes: Counter[str] = Counter()
    for _ in range(300):
        num_layers = rng.randint(8, 30)
        capacities = sorted((rng.randint(2, num_layers - 1) for _ in range(rng.randint(2, 8))), reverse=True)
        most = max(fewest_stages(capacities, num_layers), default=0)
        for replicas in range(1, len(capacities)):
            answer = Relaxation(num_layers).round_iteratively(capacities, replicas, WorkBudget(PLENTY))
            if isinstance(answer, Dual):
                assert most < replicas
                assert answer.replicas(capacities) < replicas
                assert least_weight(answer, range(1, num_layers + 1), num_layers) >= answer.total
                outcomes["proved"] += 1
            elif answer is not None:
                assert len(answer) == replicas
                assert not Counter(itertools.chain(*answer)) - Counter(capacities)
                assert all(sum(members) >= num_layers for members in answer)
                outcomes["found"] += 1
    assert outcomes["proved"] > 500
    assert outcomes["found"] > 200


def test_the_dynamic_program_decides_every_small_pool() -> None:
    rng = random.Random(13)
    for _ in range(300):
        num_layers = rng.randint(8, 30)
        capacities = sorted((rng.randint(2, num_layers - 1) for _ in range(rng.randint(2, 8))), reverse=True)
        most = max(fewest_stages(capacities, num_layers), default=0)
        for replicas in range(1, len(capacities) // 2 + 1):
            answer = decide(capacities, replicas, num_layers, WorkBudget(PLENTY))
            if replicas > most:
                assert answer is False
            else:
                assert isinstance(answer, list)
                assert len(answer) == replicas
                assert not Counter(itertools.chain(*answer)) - Counter(capacities)
                assert all(sum(members) >= num_layers for members in answer)
    assert decide([5, 5, 4, 4], 2, 9, WorkBudget(0)) is None


def test_exact_pairs_are_matched_and_nothing_is_lost() -> None:
    pairs, rest = match_pairs([7, 6, 5, 5, 5, 4, 3, 3], 10)
    assert sorted(map(sorted, pairs)) == [[3, 7], [4, 6], [5, 5]]
    assert rest == [5, 3]
    assert form([7, 6, 5, 5, 5, 4, 3, 3], 3, 10, WorkBudget(PLENTY)) is not None
    assert form([9, 9, 1], 3, 10, WorkBudget(PLENTY)) is None


def test_trim_drops_what_a_replica_can_do_without() -> None:
    assert trim([[2, 9, 8], [5, 5]], [19, 10], 10) == [[9, 8], [5, 5]]
    assert trim([[9, 1, 1]], [11], 10) == [[9, 1]]


def test_every_gap_of_a_large_pool_is_closed() -> None:
    rng = random.Random(14)
    capacities = sorted((rng.randint(4, 40) for _ in range(128)), reverse=True)
    stairs = MinNodesByReplicas(capacities, 64, WorkBudget(2000))
    assert not all(stairs.exact(k) for k in range(1, stairs.most + 1))
    budget = WorkBudget(10**6)
    for k in range(1, stairs.most + 1):
        assert stairs.tighten(k, budget, deep=True)
    for k in range(1, stairs.most + 1):
        bins = stairs.bins(k)
        assert bins is not None
        assert len(bins) == k
        assert all(sum(members) >= 64 for members in bins)
        assert not Counter(itertools.chain(*bins)) - Counter(capacities)
