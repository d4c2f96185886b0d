"""The generation state machine against a toy chain: whatever the interleaving of chunks and losses, the same tokens."""

from __future__ import annotations

import random

import pytest

from swarm.errors import ContextOverflow, InvalidRequest
from swarm.plan.session import (
    Action,
    ChainReady,
    EmitTokens,
    Finish,
    FinishReason,
    Generation,
    GenerationPlan,
    HopLost,
    RepairChain,
    SendStep,
    StepSettled,
    StopRequested,
)


def toy_model(tokens: list[int]) -> int:
    """The next token as a function of every token before it."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 2654435761 + 7) % 97


def toy_answer(prompt: list[int], count: int, eos: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        tokens.append(toy_model(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class ToyChain:
    """Runs steps in order, as a chain does, and refuses steps that do not continue what it holds."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.queue: list[SendStep] = []

    def settle(self) -> StepSettled:
        step = self.queue.pop(0)
        assert step.base == len(self.held), "a step must continue what the chain holds"
        self.held.extend(step.tokens)
        return StepSettled(step.epoch, step.step, (toy_model(self.held),) if step.sample else ())


def run(generation: Generation, rng: random.Random, loss: float = 0.0) -> tuple[list[int], FinishReason]:
    emitted: list[int] = []
    stale: list[StepSettled] = []
    chain = ToyChain()
    actions: list[Action] = generation.handle(ChainReady())
    for _ in range(10_000):
        for action in actions:
            match action:
                case SendStep():
                    chain.queue.append(action)
                case EmitTokens(tokens=tokens):
                    emitted.extend(tokens)
                case Finish(reason=reason):
                    return emitted, reason
                case RepairChain():
                    kept = rng.randint(0, len(chain.held))  # a repair may save any prefix
                    stale += [StepSettled(s.epoch, s.step, (1,)) for s in chain.queue]
                    held, chain = chain.held[:kept], ToyChain()
                    chain.held = held[: len(generation.known) - 1]
        if not generation._in_flight:
            actions = generation.handle(ChainReady(len(chain.held)))
        elif stale and rng.random() < 0.5:
            assert generation.handle(stale.pop()) == []
            actions = []
        elif rng.random() < loss:
            actions = generation.handle(HopLost("b", "killed"))
        else:
            actions = generation.handle(chain.settle())
    raise AssertionError("the generation never finished")


@pytest.mark.parametrize("seed", range(200))
def test_chunks_and_losses_never_change_the_tokens(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
    count = rng.randint(1, 20)
    plan = GenerationPlan(tuple(prompt), count, frozenset(), rng.randint(1, 16), rng.randint(1, 5))
    tokens, reason = run(Generation(plan), rng, loss=rng.choice([0.0, 0.05]))
    assert tokens == toy_answer(prompt, count)
    assert reason is FinishReason.LENGTH


def test_end_of_turn_is_kept_and_ends_it() -> None:
    prompt = [3, 1, 4]
    answer = toy_answer(prompt, 8)
    eos = frozenset({answer[4]})
    tokens, reason = run(Generation(GenerationPlan(tuple(prompt), 50, eos)), random.Random(0))
    assert tokens == toy_answer(prompt, 50, eos)
    assert reason is FinishReason.EOS


def test_prefill_chunks_are_windowed_and_only_the_last_samples() -> None:
    generation = Generation(GenerationPlan(tuple(range(10)), 5, prefill_chunk=2, window=3))
    steps = [a for a in generation.handle(ChainReady()) if isinstance(a, SendStep)]
    assert [(s.base, len(s.tokens), s.sample) for s in steps] == [(0, 2, False), (2, 2, False), (4, 2, False)]
    steps = [a for a in generation.handle(StepSettled(0, 0, ())) if isinstance(a, SendStep)]
    assert [(s.base, s.sample) for s in steps] == [(6, False)]


def test_a_multi_token_result_is_cut_at_the_budget() -> None:
    generation = Generation(GenerationPlan((1,), 3))
    generation.handle(ChainReady())
    actions = generation.handle(StepSettled(0, 0, (5, 6, 7, 8)))
    assert actions == [EmitTokens((5, 6, 7), ()), Finish(FinishReason.LENGTH)]
    assert generation.generated == (5, 6, 7)


def test_stop_ends_it_once() -> None:
    generation = Generation(GenerationPlan((1, 2), 3))
    generation.handle(ChainReady())
    assert generation.handle(StopRequested(FinishReason.CANCELLED)) == [Finish(FinishReason.CANCELLED)]
    assert generation.handle(StepSettled(0, 0, (5,))) == []
    assert generation.handle(HopLost("a", "gone")) == []


def test_a_second_loss_during_a_repair_is_not_a_second_repair() -> None:
    generation = Generation(GenerationPlan((1, 2), 3))
    generation.handle(ChainReady())
    assert generation.handle(HopLost("a", "gone")) == [RepairChain("a", "gone")]
    assert generation.handle(HopLost("b", "gone")) == []
    assert [type(a) for a in generation.handle(ChainReady())] == [SendStep]


def test_impossible_requests_are_refused() -> None:
    def check(prompt: list[int], new: int) -> GenerationPlan:
        return GenerationPlan.checked(prompt, new, eos_ids=[0], context_length=8, vocab_size=100)

    with pytest.raises(InvalidRequest, match="empty"):
        check([], 1)
    with pytest.raises(InvalidRequest, match="at least 1"):
        check([1], 0)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        check([100], 1)
    with pytest.raises(ContextOverflow, match="8 tokens"):
        check(list(range(8)), 1)
    assert check([1] * 6, 100).max_new_tokens == 2
