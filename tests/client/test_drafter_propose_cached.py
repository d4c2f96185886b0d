"""What can be said at once is heard before the rest is thought out."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarm.errors import DrafterFailed
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.threaded import ThreadedDrafter


class Thinker(Drafter):
    """Says 7, half sure; counts how often it was asked."""

    extend_is_synchronous = True

    def __init__(self) -> None:
        super().__init__("thinker")
        self.asked = 0

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.asked = 0

    def _advance(self, tokens: Sequence[int]) -> None:
        if -1 in tokens:
            raise ValueError("no such token")

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        self.asked += 1
        return [[Candidate(7, math.log(0.5))] for _ in paths]


def test_the_look_up_answers_at_once_and_leaves_the_rest_open() -> None:
    thinker = Thinker()
    both = MixtureDrafter([NgramDrafter(), thinker])
    both.reset([1, 2, 3, 4, 1, 2, 3])
    seen = both.propose_cached([(), (9,)], 4)
    assert thinker.asked == 0
    assert seen.candidates[0][0].token == 4
    claimed = math.fsum(math.exp(c.logprob) for c in seen.candidates[0])
    assert seen.unassigned_mass == [pytest.approx(1 - claimed), 1.0]
    whole = both.propose_many([(), (9,)], 4)
    assert thinker.asked == 1
    assert [c.token for c in whole[1]] == [7]
    assert {c.token for c in seen.candidates[0]} < {c.token for c in whole[0]}


def test_who_answers_at_once_leaves_nothing_open_and_who_must_think_everything() -> None:
    quick = NgramDrafter()
    quick.reset([1, 2, 1])
    assert quick.propose_cached([()], 2).unassigned_mass == [0.0]
    assert quick.propose_cached([()], 2).candidates == quick.propose_many([()], 2)
    slow = Thinker()
    slow.reset([1])
    assert slow.propose_cached([(), (3,)], 2) == ([[], []], [1.0, 1.0])
    assert MixtureDrafter([NgramDrafter()]).is_synchronous


def test_hits_of_thinking_are_those_of_the_members_that_think() -> None:
    thinker = Thinker()
    both = MixtureDrafter([NgramDrafter(), thinker])
    both.reset([1, 2, 3])
    for _ in range(40):
        both.propose_many([()], 2)
        both.extend([7])
    assert both.model_hit_rate == thinker.model_hit_rate > 0.8


async def test_a_runner_reads_the_prompt_ahead_and_answers_at_once_here() -> None:
    thinker = Thinker()
    runner = ThreadedDrafter(MixtureDrafter([NgramDrafter(), thinker]))
    await runner.reset([1, 2, 3, 1, 2])
    await runner.extend([3])
    assert thinker.asked == 1, "what reads the prompt was waited for"
    assert (await runner.propose_cached([()], 2)).candidates[0][0].token == 1
    assert thinker.asked == 1
    await runner.extend([-1])  # at which the thinker raises
    assert "no such token" in runner.drafter.failures[0]
    assert (await runner.propose_cached([()], 2)).unassigned_mass == [0.0]
    runner.close()


async def test_a_runner_whose_only_drafter_fails_is_of_no_more_use() -> None:
    runner = ThreadedDrafter(Thinker())
    await runner.reset([1, 2, 3])
    with pytest.raises(DrafterFailed, match="no such token"):
        await runner.extend([-1])
    with pytest.raises(DrafterFailed):
        await runner.propose_cached([()], 2)
    runner.close()


class Elsewhere(Thinker):
    """Notes in which thread its look-ups run."""

    cached_is_synchronous = False

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        self.thread = threading.get_ident()
        return super()._propose_cached(paths, width)


async def test_look_ups_that_may_be_slow_leave_the_event_loop_alone() -> None:
    drafter, shared = Elsewhere(), Elsewhere()
    with ThreadPoolExecutor(1) as threads:
        for own, runner in ((drafter, ThreadedDrafter(drafter)), (shared, InlineDrafter(shared, threads))):
            await runner.reset([1, 2])
            assert (await runner.propose_cached([()], 2)).unassigned_mass == [1.0]
            assert own.thread != threading.get_ident()
            with pytest.raises(DrafterFailed, match="no such token"):
                await runner.extend([-1])
            runner.close()
