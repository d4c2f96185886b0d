"""Medusa heads as a torch module: the arithmetic of `draft_heads`, with gradients. Knows no data and no schedule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from swarm_kernels.distill.student import Student
from swarm_kernels.draft_file import DraftCard
from swarm_kernels.model_config import ModelConfig


class HeadsStudent(Student):
    """`count` heads of one block on top of the whole target (Cai et al. 2024, §2.1): head k guesses k + 2 places on.

    Medusa's heads each learn an output matrix of their own, most of a file of hundreds of MB. Here it is the target's
    times a matrix `[hidden, hidden]`, the turn. They begin as Medusa's do, saying what the target's head says.
    """

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.base = config.num_layers
        self.ahead = tuple(range(2, 2 + count))
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        for weight in self.blocks.parameters():
            nn.init.zeros_(weight)
        self.turns = nn.ParameterList(torch.eye(hidden) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = zip(self.blocks, self.turns, strict=True)
        return torch.stack([F.linear(hidden + F.silu(block(hidden)), turn) for block, turn in heads])

    def soften(self, scale: float) -> None:
        with torch.no_grad():
            for turn in self.turns:
                turn.mul_(scale)

    def weights(self) -> dict[str, torch.Tensor]:
        named = {f"{k}.1.weight": turn.detach() for k, turn in enumerate(self.turns)}
        for name, weight in self.blocks.named_parameters():  # <head>.weight, <head>.bias
            named[name.replace(".", ".0.linear.")] = weight.detach()
        return named

    def card(self, model: str, weight_hash: str) -> DraftCard:
        return DraftCard(model, weight_hash, self.base, 0, len(self.blocks))
