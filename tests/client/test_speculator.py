"""What a generation learns of its drafter's time, and what it does about it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from swarm.plan.session import Draft, Drafted, Generation, GenerationPlan
from swarm.plan.speculation import ChainCosts, Stage
from swarm.types import Chain
from swarm_client.drafters.base import Candidate, Glance
from swarm_client.drafters.ngram import NgramDrafter
from swarm_client.speculator import LevelTime, Speculator

COSTS = ChainCosts(tuple(Stage(8, 0.3) for _ in range(4)), (1.0,) * 5)


class SlowThinker:
    """A guesser whose thorough answers take 4 ms of `clock`."""

    def __init__(self) -> None:
        self.drafter = NgramDrafter()
        self.now = 0.0

    async def reset(self, prompt_ids: Sequence[int]) -> None:
        self.drafter.reset(prompt_ids)

    async def extend(self, tokens: Sequence[int], hints: object = ()) -> None:
        self.drafter.extend(tokens)

    async def glance(self, paths: Sequence[Sequence[int]], width: int) -> Glance:
        return Glance([[] for _ in paths], [1.0] * len(paths))

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        self.now += 0.004
        return [[Candidate(7, -0.5)] for _ in paths]

    def close(self) -> None:
        """Nothing to end."""


def test_a_level_takes_the_mean_at_first_and_then_mostly_the_last_ones() -> None:
    time = LevelTime()
    for ms, mean in ((6.0, 6.0), (2.0, 4.0), (1.0, 3.0)):
        time.add(ms)
        assert time.ms == pytest.approx(mean)
    for _ in range(100):
        time.add(1.0)
    assert time.ms == pytest.approx(1.0, abs=0.01)


async def test_the_first_answer_of_a_drafter_gives_its_questions_a_price_and_the_next_generation_knows_it() -> None:
    known = LevelTime()
    asks = []
    for _ in range(2):
        guesser = SlowThinker()
        speculator = Speculator(
            Generation(GenerationPlan((1, 2, 3), 20, tree_room=64)),
            guesser,
            lambda chain: COSTS,
            clock=lambda guesser=guesser: guesser.now,  # type: ignore[misc]
            level_time=known,
        )
        await speculator.begin()
        speculator.chain_ready(Chain(()))
        asks.append(speculator.generation.policy.ask)
        answer = await speculator.draft(Draft(((),), 8, thorough=True))
        assert answer == Drafted((((7, -0.5),),))
        asks.append(speculator.generation.policy.ask)
    assert asks[0] == 0.0
    assert all(ask > 0.0 for ask in itertools.islice(asks, 1, None))
    assert known.ms == pytest.approx(4.0)
