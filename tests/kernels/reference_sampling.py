"""The plain reference of sampling: transformers' own processors in the documented order (`types.Sampling`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.types import Sampling
from swarm_kernels.sampling.philox import uniform


class CountPenalty(LogitsProcessor):
    """Frequency and presence penalty of the answer's tokens, as in OpenAI's documentation, one token at a time."""

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self.prompt_tokens, self.frequency, self.presence = prompt_tokens, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        answer = input_ids[0, self.prompt_tokens :].tolist()
        for token in set(answer):
            scores[0, token] -= self.frequency * answer.count(token)
            scores[0, token] -= self.presence
        return scores


class Allowed(LogitsProcessor):
    """A grammar's mask."""

    def __init__(self, allowed: np.ndarray) -> None:
        self.forbidden = torch.from_numpy(~allowed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(self.forbidden, -float("inf"))


def processors(sampling: Sampling, prompt_tokens: int = 0, allowed: np.ndarray | None = None) -> LogitsProcessorList:
    """What changes the logits before the temperature."""
    steps = LogitsProcessorList()
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in sampling.logit_bias}))
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.frequency_penalty or sampling.presence_penalty:
        steps.append(CountPenalty(prompt_tokens, sampling.frequency_penalty, sampling.presence_penalty))
    if allowed is not None:
        steps.append(Allowed(allowed))
    return steps


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """The temperature and what comes after it; nothing where the choice is greedy."""
    steps = LogitsProcessorList()
    if sampling.temperature:
        steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            steps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            steps.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            steps.append(MinPLogitsWarper(sampling.min_p))
    return steps


def distribution(
    logits: torch.Tensor,
    sampling: Sampling,
    history: Sequence[int],
    prompt_tokens: int = 0,
    allowed: np.ndarray | None = None,
) -> torch.Tensor:
    """What transformers would sample from after `logits [vocab]`, `[vocab]` probabilities."""
    steps = LogitsProcessorList([*processors(sampling, prompt_tokens, allowed), *warpers(sampling)])
    scores = steps(torch.tensor([list(history)], dtype=torch.long), logits[None].clone())
    return torch.softmax(scores, -1)[0]


def reference_token(logits: torch.Tensor, sampling: Sampling, history: Sequence[int], prompt_tokens: int = 0) -> int:
    """The token after `history`: the likeliest, or the distribution inverted at this place's random number."""
    probs = distribution(logits, sampling, history, prompt_tokens)
    if sampling.greedy:
        return int(probs.argmax())
    return inverted(probs, sampling.seed, len(history))


def inverted(probs: torch.Tensor, seed: int, position: int) -> int:
    """The token at `position` by `probs [vocab]` and this place's random number."""
    ends = (probs.double() / probs.double().sum()).cumsum(0)
    return int((ends > uniform(seed, position)).nonzero()[0])


def reference_answer(model: object, prompt: Sequence[int], count: int, sampling: Sampling) -> list[int]:
    """transformers' model, its processors and our random numbers: `count` tokens, one after the other."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        with torch.inference_mode():
            logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]  # type: ignore[operator]
        text.append(reference_token(logits, sampling, text, len(prompt)))
    return text[len(prompt) :]
