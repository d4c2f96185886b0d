"""What is trained: a module that turns the target's states into states for the target's own head to read.

Owns what the trainer asks of every kind of student. The head stays the target's: it would be most of the file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from swarm_kernels.draft_file import DraftCard


class Student(nn.Module, ABC):
    """`[b, n, hidden]` -> `[levels, b, n, hidden]`; level l of place i stands for token `i + ahead[l]`."""

    base: int
    """Layers of the target that it stands on."""

    ahead: tuple[int, ...]

    @abstractmethod
    def forward(self, hidden: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def soften(self, scale: float) -> None:
        """Before the first step: it knows less than the target, so make its logits `scale` as sharp as they began."""

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """As its file names them."""

    @abstractmethod
    def card(self, model: str, weight_hash: str) -> DraftCard:
        """Its kind and shape, for its file."""
