"""Judges the tail's result of a step by what the step asked for, and collects the prompt's log-probabilities.

Owns no other state of the generation; `state_machine` has that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.errors import ProtocolError
from swarm.messages import WireLogprobs
from swarm.planner.generation.events import GenerationRequest, SendStep, StepDone
from swarm.types import TokenLogprobs


def check_result(result: StepDone, step: SendStep, request: GenerationRequest) -> None:
    """Raises ProtocolError if `result` has another number of tokens or log-probabilities than `step` asks for, or token
    ids beyond the vocabulary.
    """
    if len(result.tokens) != step.samples:
        raise ProtocolError(f"the tail sampled {len(result.tokens)} tokens instead of {step.samples}")
    if max(result.tokens, default=0) >= request.vocab_size:
        raise ProtocolError(f"the tail sampled token {max(result.tokens)} of a vocabulary of {request.vocab_size}")
    _check_logprobs(result.logprobs, step.samples, request.logprobs, request.vocab_size)
    prompt_rows = len(_prompt_positions(step, request))
    _check_logprobs(result.prompt_logprobs, prompt_rows, request.prompt_logprobs, request.vocab_size)


def _check_logprobs(logprobs: Sequence[WireLogprobs], count: int, alternatives: int | None, vocab_size: int) -> None:
    """`alternatives`: how many were asked for with each of `count`; None: no log-probabilities at all."""
    expected = 0 if alternatives is None else count
    if len(logprobs) != expected:
        raise ProtocolError(f"the tail sent log-probabilities of {len(logprobs)} tokens instead of {expected}")
    for entry in logprobs:
        if len(entry.top_ids) != len(entry.top_neg_micronats) or len(entry.top_ids) > (alternatives or 0):
            raise ProtocolError(f"the tail sent {len(entry.top_ids)} likeliest tokens instead of {alternatives}")
        if max(entry.top_ids, default=0) >= vocab_size:
            raise ProtocolError(f"the tail sent token {max(entry.top_ids)} of a vocabulary of {vocab_size}")


def _prompt_positions(step: SendStep, request: GenerationRequest) -> range:
    """The positions of the prompt's tokens that follow the causal rows of `step`."""
    first = step.committed_before + len(step.commit_slots) + 1
    return range(first, min(first + len(step.tokens), len(request.prompt)))


@dataclass(slots=True)
class PromptLogprobs:
    """By position: after a repair, or in a new session, the tail may send some again."""

    _of: dict[int, TokenLogprobs] = field(default_factory=dict)

    def add(self, result: StepDone, step: SendStep, request: GenerationRequest) -> None:
        """`result` has passed `check_result`."""
        for position, logprobs in zip(_prompt_positions(step, request), result.prompt_logprobs, strict=False):
            self._of[position] = logprobs.to_logprobs(request.prompt[position])

    def of(self, request: GenerationRequest) -> tuple[TokenLogprobs, ...]:
        """Of each token of the prompt after the first; () before all of them are there."""
        positions = range(1, len(request.prompt))
        return tuple(self._of[i] for i in positions) if len(self._of) == len(positions) else ()
