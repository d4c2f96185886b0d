"""How often a student's guesses hold the teacher's choice: on chats neither learnt from nor written by people.

Owns the measuring from recorded expectations. `swarm-draft eval` measures the finished file instead, as a client uses
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import EMBEDDING, HEAD
from swarm_training.distill.features import TeacherTopK, TrainingExample, padded_states
from swarm_training.distill.student import Student

RANKS = (1, 4, 8)
_CHATS = 8


@dataclass(frozen=True, slots=True)
class Score:
    """The part of `places` (answers' tokens) whose likeliest token was among the first `RANKS` guesses."""

    places: int  # of the first level
    hits: tuple[tuple[float, ...], ...]  # [levels][ranks]
    covered: float  # whose likeliest token the draft vocabulary has at all

    def figures(self) -> dict[str, Any]:
        rounded = [[round(hit, 4) for hit in level] for level in self.hits]
        return {"held_out_places": self.places, "covered": round(self.covered, 4), "top_1_4_8_by_level": rounded}


@torch.no_grad()
def measure(
    student: Student, source: ModelSource, vocabulary: torch.Tensor, lessons: Sequence[TrainingExample]
) -> Score:
    """`student` on the CPU."""
    name = HEAD if source.has(HEAD) and not source.config.tie_word_embeddings else EMBEDDING
    head = source.tensor(name)[vocabulary].float()
    known = torch.zeros(source.config.vocab_size, dtype=torch.bool)
    known[vocabulary] = True
    places, covered = [0] * len(student.ahead), 0
    hits = [[0] * len(RANKS) for _ in student.ahead]
    for i in range(0, len(lessons), _CHATS):
        batch = lessons[i : i + _CHATS]
        levels = student(padded_states(batch, torch.device("cpu")))
        for level, (states, ahead) in enumerate(zip(levels, student.ahead, strict=True)):
            question = TeacherTopK.of(batch, ahead, torch.device("cpu"))
            guesses = vocabulary[F.linear(states[question.asked], head).topk(max(RANKS), -1).indices]
            choice = question.ids[:, :1]
            places[level] += len(choice)
            covered += int(known[choice].sum()) if not level else 0
            for n, rank in enumerate(RANKS):
                hits[level][n] += int((guesses[:, :rank] == choice).any(1).sum())
    shares = tuple(tuple(hit / max(1, n) for hit in row) for row, n in zip(hits, places, strict=True))
    return Score(places[0], shares, covered / max(1, places[0]))
