"""How often a student's guesses hold the teacher's choice: on chats neither learnt from nor written by people.

Owns the measuring from recorded expectations. `swarm-draft eval` measures the finished file instead, by depth, as a
client uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm_kernels.distill.corpus import Chat
from swarm_kernels.distill.features import Batch, Features
from swarm_kernels.distill.student import Student
from swarm_kernels.lean import EMBEDDING, HEAD
from swarm_kernels.model_source import ModelSource

RANKS = (1, 4, 8)
_CHATS = 8


@dataclass(frozen=True, slots=True)
class Score:
    """The part of `places` (answers' tokens) whose likeliest token was among the first `RANKS` guesses."""

    places: int
    hits: tuple[float, ...]
    covered: float  # whose likeliest token the draft vocabulary has at all

    def figures(self) -> dict[str, float]:
        named = {f"top{rank}": round(hit, 4) for rank, hit in zip(RANKS, self.hits, strict=True)}
        return {"held_out_places": self.places, "covered": round(self.covered, 4), **named}


@torch.no_grad()
def measure(student: Student, source: ModelSource, vocabulary: torch.Tensor, chats: Sequence[Chat]) -> Score:
    name = HEAD if source.has(HEAD) and not source.config.tie_word_embeddings else EMBEDDING
    head = source.tensor(name)[vocabulary].float()
    known = torch.zeros(source.config.vocab_size, dtype=torch.bool)
    known[vocabulary] = True
    states = Features(source, student.base).of(chats)
    places, covered, hits = 0, 0, [0] * len(RANKS)
    for i in range(0, len(chats), _CHATS):
        batch = Batch.of(chats[i : i + _CHATS], states[i : i + _CHATS], torch.device("cpu"))
        hidden = student(batch.hidden)[batch.asked]
        guesses = vocabulary[F.linear(hidden, head).topk(max(RANKS), -1).indices]
        choice = batch.ids[:, :1]
        places += len(choice)
        covered += int(known[choice].sum())
        for n, rank in enumerate(RANKS):
            hits[n] += int((guesses[:, :rank] == choice).any(1).sum())
    return Score(places, tuple(hit / max(1, places) for hit in hits), covered / max(1, places))
