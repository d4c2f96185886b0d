"""Hit rates of a student against the teacher's first choice, on held-out self-written chats.

Owns the evaluation on recorded predictions. `swarm-draft eval` evaluates the finished file instead, as a client uses
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import EMBEDDING, HEAD
from swarm_training.distill.features import CHATS_PER_FORWARD, TeacherTopK, TrainingExample
from swarm_training.distill.student import Student

RANKS = (1, 4, 8)
"""Numbers of candidates that hit rates are reported for."""


@dataclass(frozen=True, slots=True)
class Score:
    """The fraction of `positions` (tokens of answers) whose likeliest token was among the first `RANKS` candidates."""

    positions: int  # of the first level
    hits: tuple[tuple[float, ...], ...]  # [levels][ranks]
    covered: float  # fraction whose likeliest token is in the draft vocabulary

    def figures(self) -> dict[str, Any]:
        rounded = [[round(hit, 4) for hit in level] for level in self.hits]
        return {"held_out_places": self.positions, "covered": round(self.covered, 4), "top_1_4_8_by_level": rounded}


@torch.no_grad()
def measure(
    student: Student, source: ModelSource, vocabulary: torch.Tensor, examples: Sequence[TrainingExample]
) -> Score:
    """`student` on the CPU."""
    name = HEAD if source.has(HEAD) and not source.config.tie_word_embeddings else EMBEDDING
    head = source.tensor(name)[vocabulary].float()
    known = torch.zeros(source.config.vocab_size, dtype=torch.bool)
    known[vocabulary] = True
    positions, covered = [0] * len(student.ahead), 0
    hits = [[0] * len(RANKS) for _ in student.ahead]
    for i in range(0, len(examples), CHATS_PER_FORWARD):
        batch = examples[i : i + CHATS_PER_FORWARD]
        levels = student(*student.inputs(batch, torch.device("cpu")))
        for level, (states, ahead) in enumerate(zip(levels, student.ahead, strict=True)):
            targets = TeacherTopK.of(batch, ahead, torch.device("cpu"))
            candidates = vocabulary[F.linear(states[targets.mask], head).topk(max(RANKS), -1).indices]
            choice = targets.ids[:, :1]
            positions[level] += len(choice)
            covered += int(known[choice].sum()) if not level else 0
            for n, rank in enumerate(RANKS):
                hits[level][n] += int((candidates[:, :rank] == choice).any(1).sum())
    rates = tuple(tuple(hit / max(1, n) for hit in row) for row, n in zip(hits, positions, strict=True))
    return Score(positions[0], rates, covered / max(1, positions[0]))
