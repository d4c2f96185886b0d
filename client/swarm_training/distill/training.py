"""Trains a student on a corpus: loss, optimiser, averaging, checkpoints. Owns the state a resumed run goes on from.

The loss is the teacher's cross entropy over its likeliest tokens, as far as the draft vocabulary has them, plus the
likeliest one again: acceptance asks for the teacher's choice, not for its doubts. Levels further ahead weigh less (Cai
et al. 2024, §2.2.1). A draft that works from tokens alone sees at every depth what the teacher would see, so training
one level on the teacher's own text is training for all depths.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm.errors import CorruptModel
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import EMBEDDING, HEAD
from swarm_training.distill.corpus import GIVEN, RecordedChat
from swarm_training.distill.features import TeacherTopK, TrainingExample, padded_states
from swarm_training.distill.student import Student

CHATS_A_STEP = 8
PEAK_RATE = 2e-3
WARM_UP = 10  # steps
CHOICE_WEIGHT = 0.3  # of the teacher's first choice in the loss
LEVEL_DECAY = 0.8  # of the loss, a level
AVERAGE = 0.98  # what the averaged weights keep of themselves a step
_SCALES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)


class Trainer:
    """`learn()` takes one step; `averaged()` is the student to ship at any time."""

    def __init__(self, source: ModelSource, student: Student, vocabulary: torch.Tensor, device: torch.device) -> None:
        """`vocabulary [v]`: the token ids the draft can say, ascending."""
        self._device = device
        self.student, self.vocabulary = student.to(device), vocabulary
        name = HEAD if source.has(HEAD) and not source.config.tie_word_embeddings else EMBEDDING
        self._head = source.tensor(name)[vocabulary].float().to(device)
        self._place = torch.full((source.config.vocab_size,), -1)
        self._place[vocabulary] = torch.arange(len(vocabulary))
        self._place = self._place.to(device)
        self._lessons: list[TrainingExample] = []
        self._queue: list[int] = []
        decayed = [p for p in student.parameters() if p.dim() > 1]
        plain = [p for p in student.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
        self._average = [p.detach().clone() for p in student.parameters()]
        self.steps = self.seen = 0

    def add(self, lessons: Sequence[TrainingExample]) -> None:
        """More to learn from."""
        self._lessons += lessons

    @property
    def tokens(self) -> int:
        return sum(len(lesson.chat) for lesson in self._lessons)

    def settle_scale(self) -> None:
        """Before the first step: see `Student.scale_logits`."""
        losses = {}
        for scale in _SCALES:
            tried = copy.deepcopy(self.student)
            tried.scale_logits(scale)
            with torch.no_grad():
                losses[scale] = float(self._loss(tried, range(min(CHATS_A_STEP, len(self._lessons)))))
        self.student.scale_logits(min(losses, key=lambda scale: losses[scale]))
        self._average = [p.detach().clone() for p in self.student.parameters()]

    def learn(self, rate: float) -> float:
        """One step; `rate` 0 to 1 of the peak learning rate. -> the loss."""
        for group in self._optimiser.param_groups:
            group["lr"] = PEAK_RATE * rate * min(1.0, (self.steps + 1) / WARM_UP)
        chosen = self._draw()
        loss = self._loss(self.student, chosen)
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self._optimiser.step()
        self.steps += 1
        self.seen += sum(len(self._lessons[i].chat) for i in chosen)
        keep = min(AVERAGE, self.steps / (self.steps + 9))
        with torch.no_grad():
            for average, weight in zip(self._average, self.student.parameters(), strict=True):
                average.lerp_(weight, 1 - keep)
        return float(loss.detach())

    def averaged(self) -> Student:
        """A copy of the student with the mean of its recent weights, on the CPU."""
        student = copy.deepcopy(self.student)
        with torch.no_grad():
            for own, average in zip(student.parameters(), self._average, strict=True):
                own.copy_(average)
        return student.cpu()

    def save(self, path: Path) -> None:
        """Everything but the corpus; on disk once this returns."""
        tensors = {"vocabulary": self.vocabulary.contiguous()}
        for i, (weight, average) in enumerate(zip(self.student.parameters(), self._average, strict=True)):
            tensors[f"weight.{i}"], tensors[f"average.{i}"] = weight.detach().cpu(), average.cpu()
            for name, value in self._optimiser.state.get(weight, {}).items():
                tensors[f"optimiser.{i}.{name}"] = value.cpu()
        part = path.with_name(path.name + ".part")
        save_file(tensors, part, {"state": json.dumps({"steps": self.steps, "seen": self.seen})})
        part.replace(path)

    @staticmethod
    def vocabulary_of(path: Path) -> torch.Tensor:
        """The draft vocabulary a checkpoint was trained with. Raises CorruptModel."""
        try:
            with safe_open(path, "pt") as file:
                vocabulary: torch.Tensor = file.get_tensor("vocabulary")
                return vocabulary
        except (OSError, SafetensorError):
            raise CorruptModel(f"{path} is no checkpoint of a draft; remove it") from None

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same shape and vocabulary. Raises CorruptModel."""
        try:
            with safe_open(path, "pt") as file:
                state = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            weights = list(self.student.parameters())
            if sum(name.startswith("weight.") for name in tensors) != len(weights):
                raise ValueError("of another number of weights")
            with torch.no_grad():
                for i, weight in enumerate(weights):
                    weight.copy_(tensors[f"weight.{i}"])
                    self._average[i].copy_(tensors[f"average.{i}"])
                    prefix = f"optimiser.{i}."
                    moments = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
                    self._optimiser.state[weight] = {
                        n: t if n == "step" else t.to(weight.device) for n, t in moments.items()
                    }
            self.steps, self.seen = int(state["steps"]), int(state["seen"])
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError):
            raise CorruptModel(f"{path} is no checkpoint of this draft; remove it, or give another --work") from None

    def _draw(self) -> list[int]:
        """The next chats, each once before any comes again; of similar length, so that little is padding."""
        if len(self._queue) < CHATS_A_STEP:
            rng = random.Random(self.steps)
            order = sorted(range(len(self._lessons)), key=lambda i: len(self._lessons[i].chat) + rng.uniform(-40, 40))
            groups = [order[i : i + CHATS_A_STEP] for i in range(0, len(order), CHATS_A_STEP)]
            rng.shuffle(groups)
            self._queue = [i for group in groups for i in group]
        chosen, self._queue = self._queue[:CHATS_A_STEP], self._queue[CHATS_A_STEP:]
        return chosen

    def _loss(self, student: Student, chosen: Sequence[int]) -> torch.Tensor:
        lessons = [self._lessons[i] for i in chosen]
        levels = student(padded_states(lessons, self._device))  # [levels, b, n, hidden]
        total, weights = torch.zeros((), device=self._device), 0.0
        for level, (states, ahead) in enumerate(zip(levels, student.ahead, strict=True)):
            question = TeacherTopK.of(lessons, ahead, self._device)
            total = total + LEVEL_DECAY**level * self._surprise(states[question.asked], question)
            weights += LEVEL_DECAY**level
        return total / weights

    def _surprise(self, states: torch.Tensor, question: TeacherTopK) -> torch.Tensor:
        """How far the guesses of `states [m, hidden]` are from what the teacher expects, a place."""
        logits = F.linear(states, self._head)
        total = logits.logsumexp(-1, keepdim=True)
        places = self._place[question.ids]
        sayable = places >= 0
        belief = question.logprobs.exp() * sayable
        belief = belief / belief.sum(-1, keepdim=True).clamp_min(1e-6)
        belief[:, 0] += CHOICE_WEIGHT * sayable[:, 0]
        loss = belief * (total - logits.gather(1, places.clamp_min(0)))
        return loss.sum() / (max(1, len(loss)) * (1 + CHOICE_WEIGHT))


def frequent_tokens(chats: Sequence[RecordedChat], count: int, vocab_size: int) -> torch.Tensor:
    """The `count` ids that the teacher expects most, `[count]` ascending."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for chat in chats:
        said = chat.origin != GIVEN
        mass.scatter_add_(0, chat.top_ids[said].flatten().long(), chat.top_logprobs[said].flatten().double().exp())
    return mass.topk(min(count, vocab_size)).indices.sort().values
