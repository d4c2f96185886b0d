"""Chats that a teacher could have written: easy to learn, made without one."""

from __future__ import annotations

import torch

from swarm_training.distill.corpus import ANSWER, GIVEN, TOP, RecordedChat

VOCAB = 131


def chat_of(tokens: list[int], seed: int = 0) -> RecordedChat:
    """The teacher expects each token itself, then others."""
    n = len(tokens)
    others = torch.randint(0, VOCAB, (n, TOP), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    others[:, 0] = torch.tensor(tokens)
    logprobs = torch.full((n, TOP), -8.0)
    logprobs[:, 0] = -0.01
    origin = torch.full((n,), ANSWER, dtype=torch.uint8)
    origin[:3] = GIVEN
    taps = torch.zeros(n, 0, dtype=torch.uint8)
    return RecordedChat(torch.tensor(tokens, dtype=torch.int32), origin, others, logprobs.half(), taps)


def counting(start: int, step: int) -> RecordedChat:
    return chat_of([(start + step * i) % 100 for i in range(24)], start)
