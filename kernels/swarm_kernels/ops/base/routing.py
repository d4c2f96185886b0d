"""Which experts of a mixture a row takes, and with which scores: what routers compute behind their linear layer.

Plain torch; `cpu/routing.h` has the compiled one, with the same ties: of experts that are as good, the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from swarm.errors import KernelError

BEST_OF_GROUP = 2
"""A group of experts is as good as the sum of its so many best (DeepSeek V3, section 2.1.2)."""


class Scores(IntEnum):
    """How logits become scores. The numbers are those of `SwarmScores` in cpu/abi.h."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2  # experts are chosen by their logits, then the softmax is over those alone (gpt-oss)


@dataclass(frozen=True, slots=True)
class Routing:
    """The `chosen` experts with the best scores, best first.

    A correction is added to scores only to choose (DeepSeek V3's balancing without a loss). Of `groups` groups of
    consecutive experts, only the best `used_groups` are chosen from. `normalized`: scores are divided by their sum
    over the chosen, plus `epsilon`; then all are multiplied by `scale`.
    """

    chosen: int
    scores: Scores = Scores.SOFTMAX
    normalized: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    used_groups: int = 1

    def check(self, experts: int) -> None:
        """Raises KernelError unless so many experts can be routed to like that."""
        size = experts // max(1, self.groups)
        grouped = 1 <= self.used_groups <= self.groups and size * self.groups == experts
        if self.groups > 1 and size < BEST_OF_GROUP:
            grouped = False
        if not grouped or not 1 <= self.chosen <= self.used_groups * size:
            raise KernelError(
                f"{self.chosen} of {experts} experts in {self.used_groups} of {self.groups} groups cannot be chosen"
            )

    def __call__(
        self, logits: torch.Tensor, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits [n, experts]`, `correction [experts]` -> experts `[n, chosen]` int64, their scores likewise, fp32."""
        logits = logits.float()
        if self.scores is Scores.SOFTMAX:
            scores = torch.softmax(logits, -1)
        else:
            scores = torch.sigmoid(logits) if self.scores is Scores.SIGMOID else logits
        choice = scores if correction is None else scores + correction.float()
        if self.groups > 1:
            choice = self._in_groups(choice)
        index = _best(choice, self.chosen)
        taken = scores.gather(1, index)
        if self.scores is Scores.SOFTMAX_OF_CHOSEN:
            taken = torch.softmax(taken, -1)
        if self.normalized:
            taken = taken / (taken.sum(-1, keepdim=True) + self.epsilon)
        return index, taken * self.scale

    def _in_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """`choice` with minus infinity for the experts of groups that are not used."""
        rows, experts = choice.shape
        of_groups = choice.view(rows, self.groups, experts // self.groups)
        quality = of_groups.topk(BEST_OF_GROUP, -1).values.sum(-1)
        used = torch.zeros_like(quality, dtype=torch.bool).scatter_(1, _best(quality, self.used_groups), True)
        return of_groups.masked_fill(~used[..., None], float("-inf")).view(rows, experts)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """`[n, any]` -> the places of the `count` largest of each row, `[n, count]`, largest first, of equals the first;
    what is no number counts as larger than all."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]
