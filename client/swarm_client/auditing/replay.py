"""Runs a finished text through another chain, for its hops' reports: one prefill, sampled after each row of the answer.

Owns the steps of such a session. Its rows are causal ones, whose results do not depend on how they are cut into steps:
those of drafts depend on their tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from swarm.planner.generation.state_machine import SendStep
from swarm_client.session.inference_session import InferenceSession

SAMPLED = 64  # rows of the answer in one step: the tail has all of their logits in memory
PREFILL = 256  # rows of the prompt in one step


def replay_steps(text: Sequence[int], prompt: int, cached: int, epoch: int) -> Iterator[SendStep]:
    """All of `text`, of which the hops hold the first `cached` tokens and the first `prompt` are not to be sampled."""
    numbers = itertools.count(1)
    at, answer = cached, max(prompt - 1, cached)  # the row before the answer is the first that is sampled after
    while at < len(text):
        sample = at >= answer
        part = tuple(text[at : at + SAMPLED if sample else min(at + PREFILL, answer)])
        yield SendStep(epoch, next(numbers), at, part, sample, sample_all=sample)
        at += len(part)


async def replay(session: InferenceSession, text: Sequence[int], prompt: int) -> None:
    """Raises HopFailed."""

    async def no_matter() -> None:
        """A slow hop is not this session's concern."""

    for step in replay_steps(text, prompt, session.cached_tokens, session.epoch):
        await session.send(step)
        while (await session.receive(1.0, no_matter)).step != step.step:
            pass
