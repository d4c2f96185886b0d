"""What every drafter keeps: acceptance tables the planner takes, calibration, merging, failing alone."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import DrafterFailed, UsageError
from swarm.planner.speculation.static_tree import best_shape, check_acceptance
from swarm_client.speculation.drafters.acceptance import AcceptanceRates
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.mixture import MixtureDrafter, ProbabilityCalibrator, mix_candidates
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.threaded import ThreadedDrafter

OBSERVATIONS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 8)).flatmap(
        lambda pair: st.tuples(st.just(pair[0]), st.none() | st.integers(0, pair[1] - 1), st.just(pair[1]))
    ),
    max_size=80,
)


class Scripted(Drafter):
    """Offers the same candidates everywhere."""

    def __init__(self, name: str, candidates: Sequence[tuple[int, float]]) -> None:
        super().__init__(name)
        self.candidates = [Candidate(token, math.log(p)) for token, p in candidates]
        self.certain: list[int] = []

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.certain = list(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        self.certain += tokens

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [self.candidates[:width] for _ in paths]


class Broken(Scripted):
    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        raise ZeroDivisionError("oops")


class Stalled(Scripted):
    def __init__(self) -> None:
        super().__init__("stalled", [])
        self.release = threading.Event()

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        self.release.wait(30)
        return [[] for _ in paths]


# --- acceptance -------------------------------------------------------------------------------------------------


@given(OBSERVATIONS, st.integers(1, 8))
def test_a_table_is_always_one_the_planner_takes(seen: list[tuple[int, int | None, int]], depths: int) -> None:
    acceptance = AcceptanceRates()
    for depth, rank, width in seen:
        acceptance.observe(depth, rank, width)
    table = acceptance.table(depths)
    assert len(table) == depths
    check_acceptance(table)
    best_shape(table, 8)


def test_what_is_seen_outweighs_what_was_expected() -> None:
    acceptance = AcceptanceRates(prior=(0.9,))
    for i in range(400):
        acceptance.observe(0, 0 if i % 2 else None, 1)
    (row,) = acceptance.table(1)
    assert abs(row[0] - 0.5) < 0.06


def test_a_deeper_level_starts_from_the_one_above() -> None:
    acceptance = AcceptanceRates(prior=(0.2, 0.1))
    for _ in range(200):
        acceptance.observe(0, 1, 2)
    table = acceptance.table(3)
    assert table[2] == table[1] == table[0]
    assert table[0][1] > 0.8


def test_a_rank_nobody_asked_for_is_not_a_miss() -> None:
    acceptance = AcceptanceRates(prior=(0.3, 0.2), strength=4)
    for _ in range(50):
        acceptance.observe(0, None, 1)
    assert acceptance.table(1)[0][1] == pytest.approx(0.2)


# --- judging proposals ------------------------------------------------------------------------------------------


def test_a_proposal_waits_for_its_truth_at_the_depth_it_was_made_for() -> None:
    drafter = Scripted("s", [(5, 0.5), (6, 0.3)])
    drafter.reset([1])
    drafter.propose_many([(), (5,), (5, 6), (8,)], 2)
    drafter.extend([5])
    drafter.propose((), 2)  # what was two levels deep may be asked again: both depths are then settled
    drafter.extend([6, 9])
    table = drafter.acceptance
    assert table.observed == 4  # depth 0 twice, 1, 2
    assert table.hit_rate(1) == 1.0
    assert table.hit_rate(2) == 0.0
    assert drafter.certain == [1, 5, 6, 9]


def test_reset_forgets_what_was_proposed() -> None:
    drafter = Scripted("s", [(5, 0.5)])
    drafter.reset([1])
    drafter.propose((), 1)
    drafter.reset([1])
    drafter.extend([5])
    assert drafter.acceptance.observed == 0


# --- combination ------------------------------------------------------------------------------------------------


def test_members_share_out_belief_and_keep_their_own_accounts() -> None:
    sure, unsure = Scripted("sure", [(1, 0.9), (2, 0.05)]), Scripted("unsure", [(3, 0.4), (2, 0.3), (1, 0.1)])
    both = MixtureDrafter([sure, unsure])
    both.reset([])
    assert [guess.token for guess in both.propose((), 3)] == [1, 2, 3]  # .9 + .05 * .1, .05 + .05 * .3, .05 * .4
    both.extend([3])
    assert (sure.acceptance.hit_rate(), unsure.acceptance.hit_rate(), both.acceptance.hit_rate()) == (0.0, 1.0, 1.0)


def test_a_member_that_claims_too_much_loses_its_place() -> None:
    boaster, honest = Scripted("boaster", [(1, 0.95)]), Scripted("honest", [(2, 0.5)])
    both = MixtureDrafter([boaster, honest])
    both.reset([])
    assert both.propose((), 2)[0].token == 1
    for _ in range(60):
        both.propose((), 2)
        both.extend([2])
    assert [guess.token for guess in both.propose((), 2)] == [2, 1]


def test_a_member_that_fails_is_left_alone_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    both = MixtureDrafter([NgramDrafter(), Broken("b", [(2, 0.4)])])
    both.reset([1, 2, 1, 2])
    assert both.propose_cached([()], 4).unassigned_mass[0] > 0
    assert [guess.token for guess in both.propose((), 4)] == [1]
    assert both.propose_cached([()], 4).unassigned_mass == [0.0]  # no model is left to ask
    both.extend([1])
    assert [guess.token for guess in both.propose((), 4)] == [2]
    assert both.failures == ("going on without the drafter 'b', with ngram alone: it raised ZeroDivisionError: oops",)
    assert [record.getMessage() for record in caplog.records] == list(both.failures)


def test_the_last_member_takes_the_mixture_along() -> None:
    both = MixtureDrafter([Broken("a", []), Broken("b", [])])
    both.reset([1])
    with pytest.raises(ZeroDivisionError):
        both.propose((), 4)
    with pytest.raises(UsageError):
        MixtureDrafter([])
    with pytest.raises(UsageError):
        MixtureDrafter([NgramDrafter(), NgramDrafter()])


CLAIMS = st.dictionaries(st.integers(0, 9), st.floats(1e-6, 1.0), max_size=6)


@given(st.lists(CLAIMS, max_size=4), st.integers(1, 6))
def test_merged_claims_are_ranked_and_together_at_most_certain(claims: list[dict[int, float]], width: int) -> None:
    merged = mix_candidates([[Candidate(t, math.log(p)) for t, p in claim.items()] for claim in claims], width)
    assert len({c.token for c in merged}) == len(merged) <= width
    assert [c.logprob for c in merged] == sorted((c.logprob for c in merged), reverse=True)
    assert math.fsum(math.exp(c.logprob) for c in merged) <= 1 + 1e-9
    assert all(c.logprob <= 0 for c in merged)


def test_calibration_learns_what_claims_are_worth() -> None:
    calibration = ProbabilityCalibrator()
    claims = [Candidate(1, math.log(0.8))]
    assert calibration.corrected(claims)[0].logprob == pytest.approx(math.log(0.8))
    for i in range(1000):
        calibration.learn(claims, 1 if i % 5 == 0 else 2)
    assert math.exp(calibration.corrected(claims)[0].logprob) == pytest.approx(0.2, abs=0.05)


# --- the runner -------------------------------------------------------------------------------------------------


async def test_the_runner_does_as_the_drafter_would() -> None:
    runner = ThreadedDrafter(NgramDrafter())
    twin = NgramDrafter()
    await runner.reset([1, 2, 3, 1])
    await runner.extend([2])
    twin.reset([1, 2, 3, 1, 2])
    assert await runner.propose_many([(), (3,)], 3) == twin.propose_many([(), (3,)], 3)
    runner.close()


async def test_an_error_is_one_sentence_and_final() -> None:
    runner = ThreadedDrafter(Broken("broken", []))
    await runner.reset([1])
    with pytest.raises(DrafterFailed, match="'broken' raised ZeroDivisionError: oops; going on without it"):
        await runner.propose_many([()], 1)
    with pytest.raises(DrafterFailed):
        await runner.extend([1])
    assert runner.failure is not None


async def test_silence_is_a_failure() -> None:
    stalled = Stalled()
    runner = ThreadedDrafter(stalled, first_stall_s=0.05)
    await runner.reset([1])
    with pytest.raises(DrafterFailed, match=r"'stalled' has not answered for 0\.05 s"):
        await runner.propose_many([()], 1)
    stalled.release.set()


async def test_a_cancelled_caller_leaves_the_runner_usable() -> None:
    runner = ThreadedDrafter(Scripted("s", [(5, 0.5)]))
    await runner.reset([1])
    task = asyncio.ensure_future(runner.propose_many([()], 1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [c.token for c in (await runner.propose_many([()], 1))[0]] == [5]
    runner.close()
