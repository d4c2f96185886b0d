"""Trains a student on a corpus: loss, optimizer, weight averaging, checkpoints. Owns the state that a run resumes from.

The loss is the cross entropy to the teacher's likeliest tokens that are in the draft vocabulary, plus that to the first
one again, since acceptance depends on the teacher's first choice only. Levels further ahead weigh less (Cai et al.
2024, §2.2.1). The inputs of a draft model are tokens, the same at every depth as the teacher's, so training one level
on the teacher's own text trains all depths."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm.errors import CorruptModel
from swarm_kernels.draft.continuation_store import END
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.llama_span import EMBEDDING, HEAD
from swarm_training.distill.corpus import ANSWER, GIVEN, RecordedChat
from swarm_training.distill.features import TeacherTopK, TrainingExample
from swarm_training.distill.policy import OptimizerPolicy
from swarm_training.distill.student import Student


class Trainer:
    """`learn()` takes one step; `averaged()` is the student to export, at any time."""

    def __init__(
        self,
        source: ModelSource,
        student: Student,
        vocabulary: torch.Tensor,
        device: torch.device,
        policy: OptimizerPolicy = OptimizerPolicy(),
    ) -> None:
        """`vocabulary [v]`: the token ids that the student can predict, ascending."""
        self._device, self._policy = device, policy
        self.student, self.vocabulary = student.to(device), vocabulary
        name = HEAD if source.has(HEAD) and not source.config.tie_word_embeddings else EMBEDDING
        self._head = (
            source.tensor(name)[vocabulary].to(torch.bfloat16 if policy.mixed_precision else torch.float32).to(device)
        )
        self._vocab_index = torch.full((source.config.vocab_size,), -1)
        self._vocab_index[vocabulary] = torch.arange(len(vocabulary))
        self._vocab_index = self._vocab_index.to(device)
        self._examples: list[TrainingExample] = []
        self._queue: list[int] = []
        decayed = [p for p in student.parameters() if p.dim() > 1]
        plain = [p for p in student.parameters() if p.dim() == 1]
        self._bf16 = policy.mixed_precision and _has_fast_bf16(device)
        groups = [{"params": decayed, "weight_decay": policy.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=policy.peak_learning_rate, betas=policy.betas)
        self._average = [p.detach().clone() for p in student.parameters()]
        self.steps = self.seen = 0

    def add(self, examples: Sequence[TrainingExample]) -> None:
        """Add training examples."""
        self._examples += examples

    @property
    def tokens(self) -> int:
        return sum(len(example.chat) for example in self._examples)

    def answers(self, count: int) -> torch.Tensor:
        """`[n]`: some `count` tokens of answers it learned from, END after each."""
        parts: list[torch.Tensor] = []
        end, size = torch.tensor([END], dtype=torch.int32), 0
        for example in self._examples:
            if size >= count:
                break
            parts += [example.chat.tokens[example.chat.origin == ANSWER], end]
            size += len(parts[-2]) + 1
        return torch.cat(parts) if parts else end[:0]

    def init_logit_scale(self) -> None:
        """Before the first step: see `Student.scale_logits`."""
        losses = {}
        for scale in self._policy.initial_logit_scales:
            tried = copy.deepcopy(self.student)
            tried.scale_logits(scale)
            with torch.no_grad():
                losses[scale] = float(self._loss(tried, range(min(self._policy.batch_chats, len(self._examples)))))
        self.student.scale_logits(min(losses, key=lambda scale: losses[scale]))
        self._average = [p.detach().clone() for p in self.student.parameters()]

    def learn(self, rate: float) -> float:
        """One step; `rate`: learning rate as a fraction of the peak. -> the loss."""
        policy = self._policy
        for group in self._optimizer.param_groups:
            group["lr"] = policy.peak_learning_rate * rate * min(1.0, (self.steps + 1) / policy.warmup_steps)
        chosen = self._next_batch()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            loss = self._loss(self.student, chosen)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), policy.max_grad_norm)
        self._optimizer.step()
        self.steps += 1
        self.seen += sum(len(self._examples[i].chat) for i in chosen)
        keep = min(policy.average_decay, self.steps / (self.steps + 9))
        with torch.no_grad():
            for average, weight in zip(self._average, self.student.parameters(), strict=True):
                average.lerp_(weight, 1 - keep)
        return float(loss.detach())

    def averaged(self) -> Student:
        """A copy of the student with the EWMA of its weights, on the CPU."""
        student = copy.deepcopy(self.student)
        with torch.no_grad():
            for weight, average in zip(student.parameters(), self._average, strict=True):
                weight.copy_(average)
        return student.cpu()

    def save(self, path: Path) -> None:
        """Checkpoint everything but the corpus; it is on disk when this returns."""
        tensors = {"vocabulary": self.vocabulary.contiguous()}
        for i, (weight, average) in enumerate(zip(self.student.parameters(), self._average, strict=True)):
            tensors[f"weight.{i}"], tensors[f"average.{i}"] = weight.detach().cpu(), average.cpu()
            for name, value in self._optimizer.state.get(weight, {}).items():
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
        """Load a checkpoint of the same shape and vocabulary. Raises CorruptModel."""
        try:
            with safe_open(path, "pt") as file:
                state = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            weights = list(self.student.parameters())
            if sum(name.startswith("weight.") for name in tensors) != len(weights):
                raise ValueError("the number of weights differs")
            with torch.no_grad():
                for i, weight in enumerate(weights):
                    weight.copy_(tensors[f"weight.{i}"])
                    self._average[i].copy_(tensors[f"average.{i}"])
                    prefix = f"optimiser.{i}."
                    moments = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
                    self._optimizer.state[weight] = {
                        n: t if n == "step" else t.to(weight.device) for n, t in moments.items()
                    }
            self.steps, self.seen = int(state["steps"]), int(state["seen"])
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError):
            raise CorruptModel(f"{path} is no checkpoint of this draft; remove it, or give another --work") from None

    def _next_batch(self) -> list[int]:
        """The next chats, each once per epoch; of similar length, so that there is little padding."""
        size, jitter = self._policy.batch_chats, self._policy.length_jitter
        if len(self._queue) < size:
            rng = random.Random(self.steps)
            order = sorted(
                range(len(self._examples)), key=lambda i: len(self._examples[i].chat) + rng.uniform(-jitter, jitter)
            )
            groups = [order[i : i + size] for i in range(0, len(order), size)]
            rng.shuffle(groups)
            self._queue = [i for group in groups for i in group]
        chosen, self._queue = self._queue[:size], self._queue[size:]
        return chosen

    def _loss(self, student: Student, chosen: Sequence[int]) -> torch.Tensor:
        examples = [self._examples[i] for i in chosen]
        levels = student(*student.inputs(examples, self._device))  # [levels, b, n, hidden]
        total, weights = torch.zeros((), device=self._device), 0.0
        for level, (states, ahead) in enumerate(zip(levels, student.ahead, strict=True)):
            targets, weight = TeacherTopK.of(examples, ahead, self._device), self._policy.level_decay**level
            total = total + weight * self._cross_entropy(states[targets.mask], targets)
            weights += weight
        return total / weights

    def _cross_entropy(self, states: torch.Tensor, targets: TeacherTopK) -> torch.Tensor:
        """Mean loss of the predictions from `states [m, hidden]` against the teacher's."""
        columns = self._vocab_index[targets.ids]
        in_vocabulary = columns >= 0
        probs = targets.logprobs.exp() * in_vocabulary
        probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-6)
        probs[:, 0] += self._policy.top1_weight * in_vocabulary[:, 0]
        loss: torch.Tensor = SoftCrossEntropy.apply(states, self._head, columns.clamp_min(0), probs)  # type: ignore[no-untyped-call]
        return loss / (max(1, len(states)) * (1 + self._policy.top1_weight))


def _has_fast_bf16(device: torch.device) -> bool:
    return device.type == "cuda" or dispatch.isa() == "avx512bf16"


class SoftCrossEntropy(torch.autograd.Function):
    """Of `states @ head.T` to a few targets a row; the head learns nothing. One pass over the logits gives the loss and
    its gradient, which is half of a step's time otherwise."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, head: torch.Tensor, columns: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """`states [m, hidden]`, `head [v, hidden]`, `columns [m, k]` of the targets, `probs [m, k]` -> the sum."""
        logits = (states.to(head.dtype) @ head.T).float()
        largest = logits.amax(-1, keepdim=True)
        chosen = logits.gather(1, columns) - largest
        share = logits.sub_(largest).exp_()
        total = share.sum(-1, keepdim=True)
        mass = probs.sum(-1, keepdim=True)
        loss = (mass * total.log()).sum() - (probs * chosen).sum()
        gradient = share.mul_(mass / total).scatter_add_(1, columns, -probs)
        ctx.save_for_backward(gradient.to(head.dtype) @ head)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.float() * outer[0], None, None, None


def frequent_tokens(chats: Sequence[RecordedChat], count: int, vocab_size: int) -> torch.Tensor:
    """The `count` ids with the largest probability mass by the teacher, `[count]` ascending."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for chat in chats:
        written = chat.origin != GIVEN
        mass.scatter_add_(
            0, chat.top_ids[written].flatten().long(), chat.top_logprobs[written].flatten().double().exp()
        )
    return mass.topk(min(count, vocab_size)).indices.sort().values
