"""The generation state machine against a toy chain: drafts, losses and reordering never change the tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from toy_chain import ToyChain, toy_answer, toy_model

from swarm.errors import ContextOverflow, InvalidRequest, ProtocolError, UsageError
from swarm.planner.generation.state_machine import (
    Action,
    ChainReady,
    DiscardInFlight,
    DrafterDisabled,
    DraftsProposed,
    EmitTokens,
    Finish,
    FinishReason,
    GenerationRequest,
    GenerationState,
    HopLost,
    RepairChain,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
    StepDone,
    StopRequested,
)

Drafter = Callable[[list[int], int], list[tuple[int, float]]]
"""(text, width) -> candidates after it."""


def right(text: list[int], width: int) -> list[tuple[int, float]]:
    return [(toy_model(text), -0.1)]


def wrong(text: list[int], width: int) -> list[tuple[int, float]]:
    return [((toy_model(text) + i) % 97, -0.5 * i) for i in range(1, width + 1)]


def silent(text: list[int], width: int) -> list[tuple[int, float]]:
    return []


def sometimes(rng: random.Random, rate: float) -> Drafter:
    def draft(text: list[int], width: int) -> list[tuple[int, float]]:
        tokens = rng.sample(range(97), min(width, rng.randint(0, 4)))
        if rng.random() < rate:
            tokens = [toy_model(text), *(t for t in tokens if t != toy_model(text))][:width]
        rng.shuffle(tokens)
        return [(t, -rng.random() * 3) for t in tokens]

    return draft


def run(
    generation: GenerationState,
    rng: random.Random,
    drafter: Drafter = silent,
    *,
    hops: int = 3,
    loss: float = 0.0,
    change: Callable[[], SpeculationPolicy] | None = None,
) -> tuple[list[int], FinishReason]:
    emitted: list[int] = []
    stale: list[StepDone] = []
    chain = ToyChain.of(hops, rng)
    actions: list[Action] = generation.handle(ChainReady())
    for _ in range(20_000):
        event: DraftsProposed | ChainReady | None = None
        for action in actions:
            match action:
                case SendStep():
                    chain.send(action)
                case RequestDrafts(paths=paths, width=width, use_model=use_model):
                    texts = [[*generation.known, *path] for path in paths]
                    seen = width if use_model else width // 2
                    unassigned = () if use_model else tuple(rng.random() for _ in paths)
                    event = DraftsProposed(tuple(tuple(drafter(text, seen)) for text in texts), unassigned)
                case DiscardInFlight(epoch=epoch):
                    chain.drop(epoch)
                case EmitTokens(tokens=tokens):
                    emitted.extend(tokens)
                case Finish(reason=reason):
                    return emitted, reason
                case RepairChain(committed=committed):
                    cached = rng.choice([0, committed])
                    if cached:
                        chain.lose(cached)
                    else:
                        chain = ToyChain.of(rng.randint(1, 5), rng)
                    event = ChainReady(cached, tuple(rng.randint(1, 20) for _ in range(rng.randint(0, 4))))
        if change is not None and rng.random() < 0.1:
            generation.policy = change()
        if event is not None:
            actions = generation.handle(event)
        elif stale and rng.random() < 0.3:
            assert generation.handle(stale.pop()) == [], "late results must be ignored"
            actions = []
        elif rng.random() < loss:
            stale.append(StepDone(generation.epoch, 0, (1,)))
            actions = generation.handle(HopLost("b", "killed"))
        else:
            result = chain.next_result()
            assert result is not None, "the generation waits for nothing"
            actions = generation.handle(result)
    raise AssertionError("the generation never finished")


def begun(policy: SpeculationPolicy) -> tuple[GenerationState, list[Action]]:
    """A generation that has just got its first token, 4, and its next actions."""
    generation = GenerationState(GenerationRequest((3,), 60, reserved_tree_slots=100), policy)
    generation.handle(ChainReady())
    _, *actions = generation.handle(StepDone(0, 0, (4,)))
    return generation, actions


def policies(rng: random.Random) -> SpeculationPolicy:
    shape = rng.choice([0, 1, 2, 5, 16]), rng.randint(1, 6), rng.randint(1, 9), rng.choice([0.0, 0.05, 0.5])
    return SpeculationPolicy(
        *shape, rng.choice([0.0, 0.3]), rng.choice([None, 0.0, 0.4, math.inf]), rng.choice([0.0, 0.2])
    )


@pytest.mark.parametrize("seed", range(600))
def test_drafts_chunks_and_losses_never_change_the_tokens(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
    count = rng.randint(1, 40)
    eos = frozenset(rng.sample(range(97), rng.choice([0, 0, 2])))
    request = GenerationRequest(
        tuple(prompt), count, eos, rng.randint(1, 16), rng.randint(1, 5), reserved_tree_slots=200
    )
    drafter = rng.choice([right, wrong, silent, sometimes(rng, 0.5), sometimes(rng, 0.9)])
    change = rng.choice([None, lambda: policies(rng)])
    tokens, reason = run(
        GenerationState(request, policies(rng)),
        rng,
        drafter,
        hops=rng.randint(1, 5),
        loss=rng.choice([0.0, 0.05]),
        change=change,
    )
    assert tokens == toy_answer(prompt, count, eos)
    assert reason is (FinishReason.EOS if tokens[-1] in eos else FinishReason.LENGTH)


def test_accepted_drafts_commit_many_tokens_a_step() -> None:
    request = GenerationRequest((3, 1, 4), 60, reserved_tree_slots=100)
    tree = GenerationState(request, SpeculationPolicy(max_tree_rows=5, max_depth_per_step=5))
    run(tree, random.Random(1), right)
    assert tree.stats.steps == 11  # the prompt, then the root and five accepted drafts each
    pipelined = GenerationState(request, SpeculationPolicy(max_tree_rows=1, max_steps_in_flight=8))
    run(pipelined, random.Random(1), right)
    assert pipelined.stats.rejected == 1  # nothing is drafted before the first token
    assert pipelined.stats.discarded_steps == 0
    assert pipelined.stats.accepted == 58  # all others but the last, which nothing follows


def test_one_level_a_step_keeps_so_many_in_flight() -> None:
    generation, actions = begun(SpeculationPolicy(max_tree_rows=2, max_steps_in_flight=4))
    steps: list[SendStep] = []
    while actions:
        steps += [action for action in actions if isinstance(action, SendStep)]
        requests = [action for action in actions if isinstance(action, RequestDrafts)]
        texts = [[*generation.known, *path] for draft in requests for path in draft.paths]
        actions = generation.handle(DraftsProposed(tuple(tuple(wrong(text, 2)) for text in texts))) if requests else []
    assert [len(step.rows) for step in steps] == [2, 2, 2, 2]
    assert [len(step.tokens) for step in steps] == [1, 0, 0, 0]
    assert [step.committed_before for step in steps] == [1, 2, 2, 2]


def test_unlikely_drafts_are_not_sent() -> None:
    generation, (draft,) = begun(SpeculationPolicy(max_tree_rows=8, max_depth_per_step=3, min_node_prob=0.3))
    assert isinstance(draft, RequestDrafts)
    candidates = ((5, -0.1), (6, -1.0), (7, -2.0))
    actions = generation.handle(DraftsProposed((candidates,)))
    while isinstance(actions[0], RequestDrafts):
        actions = generation.handle(DraftsProposed(tuple(((9, -0.9),) for _ in actions[0].paths)))
    (step,) = actions
    assert isinstance(step, SendStep)
    assert sorted(step.rows) == [5, 6, 9]  # p = .90, .37 and .90 * .41; .14 and .37 * .41 are below min_node_prob


def test_a_failed_drafter_is_not_asked_again() -> None:
    generation, (draft,) = begun(SpeculationPolicy(max_tree_rows=4, max_depth_per_step=2))
    assert isinstance(draft, RequestDrafts)
    (step,) = generation.handle(DrafterDisabled())
    assert isinstance(step, SendStep)
    assert (step.tokens, step.rows) == ((4,), ())


@pytest.mark.parametrize("tokens", [(), (1, 2), (1, 2, 3)])
def test_a_wrong_number_of_samples_is_refused(tokens: tuple[int, ...]) -> None:
    generation = GenerationState(GenerationRequest((3,), 4))
    generation.handle(ChainReady())
    with pytest.raises(ProtocolError, match="sampled"):
        generation.handle(StepDone(0, 0, tokens))


def test_end_of_turn_is_kept_and_ends_it() -> None:
    prompt = [3, 1, 4]
    answer = toy_answer(prompt, 8)
    eos = frozenset({answer[4]})
    tokens, reason = run(GenerationState(GenerationRequest(tuple(prompt), 50, eos)), random.Random(0))
    assert reason is FinishReason.EOS
    assert tokens == toy_answer(prompt, 50, eos)


def test_prefill_chunks_follow_each_other() -> None:
    generation = GenerationState(GenerationRequest(tuple(range(10)), 4, prefill_chunk=3, prefill_window=2))
    first, second = generation.handle(ChainReady())
    assert isinstance(first, SendStep)
    assert isinstance(second, SendStep)
    assert (first.tokens, first.sample, second.committed_before) == ((0, 1, 2), False, 3)
    (third,) = generation.handle(StepDone(0, 0, ()))
    assert isinstance(third, SendStep)
    assert (third.committed_before, third.tokens, third.sample) == (6, (6, 7, 8), False)
    (fourth,) = generation.handle(StepDone(0, 1, ()))
    assert isinstance(fourth, SendStep)
    assert (fourth.tokens, fourth.sample) == ((9,), True)


def test_a_loss_reports_the_committed_tokens_and_one_during_a_repair_begins_another() -> None:
    generation = GenerationState(GenerationRequest(tuple(range(10)), 4, prefill_chunk=4))
    generation.handle(ChainReady())
    generation.handle(StepDone(0, 0, ()))
    assert generation.handle(HopLost("a", "gone")) == [RepairChain("a", "gone", 4)]
    assert generation.handle(HopLost("b", "gone too")) == [RepairChain("b", "gone too", 4)]
    assert generation.handle(StepDone(0, 1, ())) == []
    first, *_ = generation.handle(ChainReady(cached_tokens=4))
    assert isinstance(first, SendStep)
    assert (first.epoch, first.committed_before, first.tokens) == (2, 4, (4, 5, 6, 7))


def test_a_chain_may_set_the_prefill_chunks() -> None:
    generation = GenerationState(GenerationRequest(tuple(range(10)), 4, prefill_chunk=3))
    steps = generation.handle(ChainReady(cached_tokens=2, chunks=(5, 2)))
    assert [s.tokens for s in steps if isinstance(s, SendStep)] == [(2, 3, 4, 5, 6), (7, 8), (9,)]


def test_the_last_known_token_is_sent_even_if_cached() -> None:
    generation = GenerationState(GenerationRequest((1, 2, 3), 4))
    (step,) = generation.handle(ChainReady(cached_tokens=3))
    assert isinstance(step, SendStep)
    assert (step.committed_before, step.tokens) == (2, (3,))


def test_stopping_ends_it() -> None:
    generation = GenerationState(GenerationRequest((1, 2, 3), 4))
    generation.handle(ChainReady())
    assert generation.handle(StopRequested(FinishReason.CANCELLED)) == [Finish(FinishReason.CANCELLED)]
    assert generation.handle(ChainReady()) == []


def test_requests_are_checked() -> None:
    good: dict[str, Any] = {"eos_ids": (2,), "context_length": 16, "vocab_size": 100}
    assert GenerationRequest.checked([1, 2], 50, **good).max_new_tokens == 14
    assert GenerationRequest.checked([1, 2], 50, reserved_tree_slots=64, **good).reserved_tree_slots == 0
    assert GenerationRequest.checked([1, 2], 4, reserved_tree_slots=64, **good).reserved_tree_slots == 10
    with pytest.raises(InvalidRequest, match="empty"):
        GenerationRequest.checked([], 5, **good)
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        GenerationRequest.checked([1], 0, **good)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        GenerationRequest.checked([100], 5, **good)
    with pytest.raises(ContextOverflow):
        GenerationRequest.checked([1] * 16, 5, **good)
    with pytest.raises(UsageError):
        SpeculationPolicy(max_tree_rows=-1)
