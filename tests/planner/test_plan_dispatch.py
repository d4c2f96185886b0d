"""HypSched-RT: the earliest completion among nodes that are available and have the memory."""

from __future__ import annotations

import math
import random

import pytest

from swarm.errors import Infeasible, UsageError
from swarm.planner.pipeline.dispatch import Dispatch, NodeLoad, dispatch


@pytest.mark.parametrize("seed", range(4))
def test_matches_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1000):
        work, memory = rng.choice([0, 1, 5]), rng.choice([0, 2, 4])
        nodes = [
            NodeLoad(
                id=name,
                capacity=rng.choice([1, 2, 4]),
                available_memory=rng.choice([1, 3, 5]),
                running_remaining=rng.choice([0, 1, 2]),
                queued=tuple(rng.choice([1, 2, 7]) for _ in range(rng.randint(0, 3))),
                available=rng.random() < 0.8,
            )
            for name in rng.sample("abcdef", rng.randint(1, 6))
        ]
        done = {
            n.id: (n.running_remaining + sum(n.queued) + work) / n.capacity * 1000
            for n in nodes
            if n.available and n.available_memory >= memory
        }
        if not done:
            with pytest.raises(Infeasible):
                dispatch(work, memory, nodes)
            continue
        answer = dispatch(work, memory, nodes)
        assert answer.completion_ms == min(done.values())
        assert answer.node == min(name for name, ms in done.items() if ms == answer.completion_ms)


def test_a_busy_fast_node_loses_to_an_idle_slow_one() -> None:
    fast = NodeLoad("fast", capacity=1e12, available_memory=8, running_remaining=1e12, queued=(4e12, 4e12))
    slow = NodeLoad("slow", capacity=2e11, available_memory=8)
    assert dispatch(1e12, 1, [fast, slow]) == Dispatch("slow", 5000.0)


def test_the_order_of_nodes_does_not_matter() -> None:
    nodes = [NodeLoad(name, 1, 1) for name in "cab"]
    assert dispatch(1, 1, nodes).node == dispatch(1, 1, nodes[::-1]).node == "a"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "no node"),
        ([NodeLoad("a", 1, 9, available=False)], "none of the 1 nodes is available"),
        ([NodeLoad("a", 1, 1), NodeLoad("b", 1, 2), NodeLoad("c", 1, 9, available=False)], r"needs 4 .* 2 \(node b\)"),
    ],
)
def test_what_rules_every_node_out_is_named(nodes: list[NodeLoad], words: str) -> None:
    with pytest.raises(Infeasible, match=words):
        dispatch(1, 4, nodes)


@pytest.mark.parametrize(
    "node", [NodeLoad("a", 0, 1), NodeLoad("a", -1, 1), NodeLoad("a", 1, math.nan), NodeLoad("a", 1, 1, queued=(-1,))]
)
def test_impossible_input_is_refused(node: NodeLoad) -> None:
    with pytest.raises(UsageError):
        dispatch(1, 1, [node])
