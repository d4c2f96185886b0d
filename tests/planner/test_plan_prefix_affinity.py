"""The chain with a cached prefix or a faster one: whichever finishes sooner."""

from __future__ import annotations

import random

import pytest

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.pipeline.prefill_chunking import plan_prefill
from swarm.planner.routing.policy import POLICY
from swarm.planner.routing.prefix_affinity import prefer_cached_prefix
from swarm.types import CostCurve

pytestmark = pytest.mark.slow


def costs(hops: int) -> ChainCosts:
    curve = CostCurve((1, 8, 64), (0.5, 0.8, 3.0))
    return ChainCosts(tuple(Stage(4, curve.ms_at(1), curve) for _ in range(hops)), (5.0,) * (hops + 1))


def test_the_chain_that_finishes_first_is_chosen() -> None:
    rng, seen = random.Random(5), set()
    for _ in range(500):
        best, held, tokens = (
            costs(rng.randint(1, 5)),
            rng.randint(1, 2000),
            rng.randint(1, POLICY.typical_answer_tokens),
        )
        usual_ms, best_ms = rng.uniform(10, 30), rng.uniform(9, 12)
        read_ms = plan_prefill(held, len(best.stages), min(held, 32), best.chunk_cost()).latency_ms
        answer = prefer_cached_prefix(held, tokens, usual_ms, best_ms, best)
        assert answer == (tokens * usual_ms <= read_ms + tokens * best_ms)
        seen.add(answer)
    assert seen == {True, False}


@pytest.mark.parametrize("tokens", [POLICY.typical_answer_tokens, 10 * POLICY.typical_answer_tokens])
def test_a_generous_limit_is_not_taken_for_the_length_of_the_answer(tokens: int) -> None:
    assert prefer_cached_prefix(1024, tokens, 11.0, 10.0, costs(3)) == prefer_cached_prefix(
        1024, POLICY.typical_answer_tokens, 11.0, 10.0, costs(3)
    )


def test_without_a_cached_prefix_the_best_chain_is_chosen() -> None:
    assert not prefer_cached_prefix(0, 1, 1.0, 1.0, costs(1))
