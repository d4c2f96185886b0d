"""Log-probabilities come with the tokens that they belong to, whatever the drafts, chunks and losses; and a tail that
sends others than asked for is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from toy_chain import ToyChain, toy_answer, toy_model

from swarm.errors import ProtocolError
from swarm.messages import WireLogprobs
from swarm.planner.generation.state_machine import (
    Action,
    ChainReady,
    DraftsProposed,
    EmitTokens,
    Event,
    Finish,
    GenerationRequest,
    GenerationState,
    HopLost,
    RepairChain,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
    StepDone,
)
from swarm.types import TokenLogprobs

VOCAB = 97


def neg_micronats(text: list[int]) -> int:
    """Of the token after `text`: another number for almost every text."""
    return sum((i + 3) * t for i, t in enumerate(text)) * 40503 % 999_983


def coded(text: list[int]) -> int:
    """Token and log-probability as one number, which ToyChain takes for the token."""
    return neg_micronats(text) * VOCAB + toy_model(text)


def logprobs_of(text: list[int], start: int) -> tuple[TokenLogprobs, ...]:
    """Of the tokens of `text` from position `start` on, with the token itself as the likeliest one."""
    values = [-neg_micronats(text[:i]) / 1e6 for i in range(start, len(text))]
    return tuple(TokenLogprobs(t, v, ((t, v),)) for t, v in zip(text[start:], values, strict=True))


def wire(text: list[int], start: int, end: int) -> tuple[WireLogprobs, ...]:
    values = [(text[i], neg_micronats(text[:i])) for i in range(start, end)]
    return tuple(WireLogprobs(value, [token], [value]) for token, value in values)


@dataclass
class Driver:
    """A generation on a toy chain whose tail sends log-probabilities, with random drafts and losses."""

    request: GenerationRequest
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def run(self, policy: SpeculationPolicy) -> GenerationState:
        rng, generation = self.rng, GenerationState(self.request, policy)
        chain, steps = self._chain(), dict[int, SendStep]()
        actions: list[Action] = generation.handle(ChainReady())
        for _ in range(5000):
            event: Event | None = None
            for action in actions:
                match action:
                    case SendStep():
                        steps[action.step] = action
                        chain.send(action)
                    case RequestDrafts(paths=paths):
                        event = DraftsProposed(tuple(self._drafts([*generation.known, *path]) for path in paths))
                    case EmitTokens():
                        self.tokens += action.tokens
                        self.logprobs += action.logprobs
                    case RepairChain(committed=committed):
                        held = rng.choice([0, committed])  # 0: a new session, on another chain
                        chain.lose(held)
                        chain = chain if held else self._chain()
                        event = ChainReady(held)
                    case Finish():
                        return generation
            if event is None and rng.random() < 0.04:
                event = HopLost("b", "killed")
            if event is None:
                coded_result = chain.next_result()
                assert coded_result is not None
                event = self._decoded(coded_result, steps[coded_result.step])
            actions = generation.handle(event)
        raise AssertionError("the generation never finished")

    def _chain(self) -> ToyChain:
        return ToyChain.of(self.rng.randint(1, 3), self.rng, coded)

    def _drafts(self, text: list[int]) -> tuple[tuple[int, float], ...]:
        tokens = self.rng.sample(range(VOCAB), 3)
        if self.rng.random() < 0.7:
            tokens[1] = toy_model(text)
        return tuple((token, -0.3 - 0.1 * i) for i, token in enumerate(dict.fromkeys(tokens)))

    def _decoded(self, result: StepDone, step: SendStep) -> StepDone:
        prompt = list(self.request.prompt)
        first = step.committed_before + len(step.commit_slots) + 1
        tokens = tuple(code % VOCAB for code in result.tokens)
        values = [code // VOCAB for code in result.tokens]
        return replace(
            result,
            tokens=tokens,
            logprobs=tuple(WireLogprobs(v, [t], [v]) for t, v in zip(tokens, values, strict=True)),
            prompt_logprobs=wire(prompt, first, max(first, min(first + len(step.tokens), len(prompt)))),
        )


@pytest.mark.parametrize("seed", range(150))
def test_every_token_has_its_own_log_probability(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
    count = rng.randint(1, 40)
    request = GenerationRequest(
        tuple(prompt), count, frozenset(), rng.randint(1, 16), rng.randint(1, 5), 200, VOCAB, 1, 1
    )
    policy = SpeculationPolicy(rng.choice([0, 1, 5]), rng.randint(1, 4), rng.randint(1, 6))
    driver = Driver(request, rng)
    generation = driver.run(policy)
    answer = toy_answer(prompt, count)
    assert driver.tokens == answer
    assert tuple(driver.logprobs) == logprobs_of([*prompt, *answer], len(prompt))
    assert generation.prompt_logprobs == logprobs_of(prompt, 1)


LOGPROBS = WireLogprobs(5, [1, 2], [5, 6])


def waiting(prompt: tuple[int, ...] = (3,), **asked: int) -> GenerationState:
    generation = GenerationState(GenerationRequest(prompt, 4, vocab_size=VOCAB, **asked))  # type: ignore[arg-type]
    generation.handle(ChainReady())
    return generation


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (None, (LOGPROBS,)),
        (2, ()),
        (2, (LOGPROBS, LOGPROBS)),
        (1, (LOGPROBS,)),
        (2, (WireLogprobs(5, [1, 2], [5]),)),
        (2, (WireLogprobs(5, [1, VOCAB], [5, 6]),)),
    ],
)
def test_other_log_probabilities_than_asked_for_are_refused(asked: int | None, sent: tuple[WireLogprobs, ...]) -> None:
    wanted = {} if asked is None else {"logprobs": asked}
    with pytest.raises(ProtocolError, match="the tail sent"):
        waiting(**wanted).handle(StepDone(0, 0, (7,), logprobs=sent))
    wanted = {} if asked is None else {"prompt_logprobs": asked}
    with pytest.raises(ProtocolError, match="the tail sent"):
        waiting((3, 4), **wanted).handle(StepDone(0, 0, (7,), prompt_logprobs=sent))


def test_those_asked_for_are_taken() -> None:
    generation = waiting((3, 4), logprobs=2, prompt_logprobs=2)
    assert generation.prompt_logprobs == ()
    emitted, *_ = generation.handle(StepDone(0, 0, (7,), logprobs=(LOGPROBS,), prompt_logprobs=(LOGPROBS,)))
    top = ((1, -5e-06), (2, -6e-06))
    assert isinstance(emitted, EmitTokens)
    assert emitted.logprobs == (TokenLogprobs(7, -5e-06, top),)
    assert generation.prompt_logprobs == (TokenLogprobs(4, -5e-06, top),)
