"""What a generation learns of its drafter's time, and what it does about it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.generation.state_machine import (
    DraftsProposed,
    GenerationRequest,
    GenerationState,
    RequestDrafts,
    SendStep,
    StepDone,
)
from swarm.types import Chain, CostCurve, Hop
from swarm_client.speculation.controller import MAX_CHAINS, ClientSpeculation, DraftingStats
from swarm_client.speculation.drafters.base import CachedProposal, Candidate
from swarm_client.speculation.drafters.ngram import NgramDrafter

CURVE = CostCurve((1, 8), (0.3, 0.4))
COSTS = ChainCosts(tuple(Stage(8, 0.3, CURVE) for _ in range(4)), (1.0,) * 5)


class SlowThinker:
    """A guesser whose thorough answers take 4 ms of `clock`."""

    def __init__(self) -> None:
        self.drafter = NgramDrafter()
        self.now = 0.0

    async def reset(self, prompt_ids: Sequence[int]) -> None:
        self.drafter.reset(prompt_ids)

    async def extend(self, tokens: Sequence[int], hints: object = (), taps: object = (), ahead: object = None) -> None:
        self.drafter.extend(tokens)

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        return CachedProposal([[] for _ in paths], [1.0] * len(paths))

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        self.now += 0.004
        return [[Candidate(7, -0.5)] for _ in paths]

    def close(self) -> None:
        """Nothing to end."""


def test_a_level_takes_the_mean_at_first_and_then_mostly_the_last_ones() -> None:
    experience = DraftingStats()
    for ms, mean in ((6.0, 6.0), (2.0, 4.0), (1.0, 3.0)):
        experience.record_call(ms)
        assert experience.level_ms == pytest.approx(mean)
    for _ in range(100):
        experience.record_call(1.0)
    assert experience.level_ms == pytest.approx(1.0, abs=0.01)


def test_what_is_known_of_the_crowding_of_chains_is_bounded() -> None:
    experience = DraftingStats()
    chains = [Chain((Hop(f"p{i}", 0, 8),)) for i in range(MAX_CHAINS + 1)]
    for i, chain in enumerate(chains):
        experience.record_contention(chain, 1.0 + i)
    assert experience.contention(chains[0]) == 1.0
    assert [experience.contention(chain) for chain in chains[1:]] == [1.0 + i for i in range(1, len(chains))]


async def test_hops_that_slowed_each_other_down_are_expected_to_do_so_again() -> None:
    known = DraftingStats()
    chain = Chain(tuple(Hop(f"p{i}", 8 * i, 8 * i + 8) for i in range(4)))
    for expected in (1.0, pytest.approx(1.2)):
        speculator = ClientSpeculation(
            GenerationState(GenerationRequest((1, 2, 3), 20, reserved_tree_slots=64)),
            SlowThinker(),
            lambda chain: COSTS,
            stats=known,
        )
        await speculator.begin()
        speculator.chain_ready(chain)
        assert known.contention(chain) == expected
        for number in range(2):
            speculator.sent(SendStep(0, number, 3, (4,), sample=True))
        speculator.on_result(StepDone(0, 0, (5,), ((0.0, 8 * 0.6),) * 4))  # twice what it takes alone
    assert speculator._controller is not None
    assert speculator._controller.contention == pytest.approx(1.36)


async def test_the_first_answer_of_a_drafter_gives_its_questions_a_price_and_the_next_generation_knows_it() -> None:
    known = DraftingStats()
    asks = []
    for _ in range(2):
        guesser = SlowThinker()
        speculator = ClientSpeculation(
            GenerationState(GenerationRequest((1, 2, 3), 20, reserved_tree_slots=64)),
            guesser,
            lambda chain: COSTS,
            clock=lambda guesser=guesser: guesser.now,  # type: ignore[misc]
            stats=known,
        )
        await speculator.begin()
        speculator.chain_ready(Chain(()))
        asks.append(speculator.generation.policy.min_mass_blocking)
        answer = await speculator.draft(RequestDrafts(((),), 8, use_model=True))
        assert answer == DraftsProposed((((7, -0.5),),))
        asks.append(speculator.generation.policy.min_mass_blocking)
    assert asks[0] == 0.0
    assert all(ask > 0.0 for ask in itertools.islice(asks, 1, None))
    assert known.level_ms == pytest.approx(4.0)
