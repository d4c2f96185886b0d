"""One run of `swarm-draft train`: write chats until there are enough, train on them until the time is up, export.

Owns the order of these, what is kept in the work folder between runs and what is held out. Progress goes to a callback.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from swarm.errors import Infeasible, UnsupportedModel, UsageError
from swarm_kernels.draft.file import DraftMetadata, DraftWeights
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.tokenizer import load_tokenizer
from swarm_training.distill.corpus import Corpus, RecordedChat
from swarm_training.distill.features import Features, TrainingExample, load_teacher
from swarm_training.distill.policy import ChatPolicy, OptimizerPolicy
from swarm_training.distill.recipes import LayersRecipe, Recipe
from swarm_training.distill.self_chat import ChatGenerator
from swarm_training.distill.student import Student
from swarm_training.distill.tap_rows import tapped_examples
from swarm_training.distill.training import Trainer, frequent_tokens
from swarm_training.distill.validation import measure

Report = Callable[[str, float, str], None]
"""(phase, fraction done, a note)."""

_SHARD = 32  # chats
_CURVE_POINTS = 12  # of the loss, at most, in the draft's card


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to train and for how long."""

    minutes: float
    out: Path
    work: Path
    recipe: Recipe = field(default_factory=LayersRecipe)
    tokens: int = 300_000  # of chats to write before training
    writing: float = 0.5  # fraction of the time for writing them
    vocabulary: int = 8192
    store_tokens: int = 400_000  # of answers in the draft's file, two bytes each
    batch: int = 48
    device: str = "cpu"
    save_every_s: float = 180.0
    chat_policy: ChatPolicy = field(default_factory=ChatPolicy)
    optimizer_policy: OptimizerPolicy = field(default_factory=OptimizerPolicy)

    def checked(self, num_layers: int) -> TrainingPlan:
        """Raises UsageError."""
        if not 0 < self.minutes < 1e5 or self.tokens < 1000 or not 0 < self.writing < 1 or self.batch < 1:
            raise UsageError("give some minutes, at least 1000 tokens, a batch of at least 1, and time to learn")
        self.recipe.check(num_layers)
        if self.vocabulary < 64:
            raise UsageError("a draft vocabulary needs at least 64 tokens")
        return self


def train(
    source: ModelSource, plan: TrainingPlan, report: Report, clock: Callable[[], float] = time.monotonic
) -> DraftMetadata:
    """Write chats, train, export; resumes from the work folder. -> the metadata of the result.

    Raises UsageError, UnsupportedModel (not a Llama-like model, or without a chat template), CorruptModel (the work
    folder is another model's), Infeasible (too little time to write or train anything).
    """
    plan.checked(source.config.num_layers)
    if not source.config.is_llama_like:
        raise UnsupportedModel(f"{source.name} is a {source.config.model_type}; drafts are made of Llama-like models")
    started = clock()
    corpus = Corpus(plan.work, source.weight_hash)
    _write(source, plan, corpus, report, started, clock)
    if corpus.chats < 2:
        raise Infeasible("too little time to write a single chat; give more --minutes")
    student = plan.recipe.student(source)

    def on_prepared(fraction: float) -> None:
        report("preparing", fraction, f"{corpus.tokens} tokens")
        if clock() >= started + plan.minutes * 60:
            raise Infeasible("no time was left to learn; run it again with this --work, it goes on where it stopped")

    device, taps = torch.device(plan.device), plan.recipe.taps(source.config.num_layers)
    if taps:
        examples = tapped_examples(source, corpus, taps, device, on_prepared)
    else:
        examples = Features(source, student.base, device).examples(corpus, on_prepared)
    held_out, training = _split(examples, plan.optimizer_policy.holdout_every)
    trainer = _trainer(source, plan, student, training)
    curve = _learn(source, plan, trainer, report, started, clock)
    report("measuring", 0.0, "")
    score = measure(trainer.averaged(), source, trainer.vocabulary, held_out)
    draft = _export(source, plan, trainer, {**score.figures(), "loss_by_seen_tokens": curve})
    report("measuring", 1.0, "")
    return draft.card


def _write(
    source: ModelSource, plan: TrainingPlan, corpus: Corpus, report: Report, started: float, clock: Callable[[], float]
) -> None:
    deadline = started + plan.minutes * 60 * plan.writing
    if corpus.tokens >= plan.tokens:
        return
    report("loading", 0.0, "")
    span = load_teacher(source, source.config.num_layers, torch.device(plan.device))
    taps = plan.recipe.taps(source.config.num_layers)
    generator = ChatGenerator(span, load_tokenizer(source), plan.batch, len(corpus), plan.chat_policy, taps)
    began, before = clock(), corpus.tokens
    shard: list[RecordedChat] = []
    for chat in generator.write():
        shard.append(chat)
        written = corpus.tokens + sum(len(chat) for chat in shard)
        enough = clock() >= deadline or written >= plan.tokens
        if enough or len(shard) == _SHARD:
            corpus.append(shard, taps)
            shard = []
        rate = (written - before) / max(1e-9, clock() - began)
        report("writing", written / plan.tokens, f"{written} tokens, {rate:.0f} a second")
        if enough:
            return


def _split(examples: list[TrainingExample], every: int) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """(held out, for training): by index, so that a longer corpus holds out the same chats and more."""
    held_out = [example for i, example in enumerate(examples) if i % every == every // 2]
    return held_out or examples[:1], [example for i, example in enumerate(examples) if i % every != every // 2]


def _trainer(source: ModelSource, plan: TrainingPlan, student: Student, examples: list[TrainingExample]) -> Trainer:
    checkpoint = plan.work / plan.recipe.checkpoint
    resumed = checkpoint.is_file()
    vocabulary = (
        Trainer.vocabulary_of(checkpoint)
        if resumed
        else frequent_tokens([example.chat for example in examples], plan.vocabulary, source.config.vocab_size)
    )
    policy = replace(plan.optimizer_policy, peak_learning_rate=plan.recipe.peak_learning_rate)
    trainer = Trainer(source, student, vocabulary, torch.device(plan.device), policy)
    trainer.add(examples)
    if resumed:
        trainer.resume(checkpoint)
    else:
        student.initialize(examples)
        trainer.init_logit_scale()
    return trainer


def _learn(
    source: ModelSource,
    plan: TrainingPlan,
    trainer: Trainer,
    report: Report,
    started: float,
    clock: Callable[[], float],
) -> list[list[float]]:
    """-> the loss, by tokens seen."""
    curve: list[list[float]] = []
    began, deadline = clock(), started + plan.minutes * 60
    saved, seen = began, trainer.seen
    loss, min_rate = 0.0, plan.optimizer_policy.min_learning_rate
    while (now := clock()) < deadline:
        fraction = (now - began) / max(1e-9, deadline - began)
        rate = max(min_rate, min(1.0, 2 * (1 - fraction)))  # constant for half of the time, then linear decay
        value = trainer.learn(rate)
        loss = value if not loss else 0.95 * loss + 0.05 * value
        speed = (trainer.seen - seen) / max(1e-9, clock() - began)
        if fraction * _CURVE_POINTS >= len(curve):
            curve.append([trainer.seen, round(loss, 3)])
        report("learning", fraction, f"loss {loss:.3f}, {trainer.steps} steps, {speed:.0f} tokens a second")
        if clock() - saved > plan.save_every_s:
            trainer.save(plan.work / plan.recipe.checkpoint)
            _export(source, plan, trainer, {})
            saved = clock()
    trainer.save(plan.work / plan.recipe.checkpoint)
    return [*curve, [trainer.seen, round(loss, 3)]]


def _export(source: ModelSource, plan: TrainingPlan, trainer: Trainer, evaluation: dict[str, Any]) -> DraftWeights:
    student = trainer.averaged()
    card = replace(
        student.metadata(source.name, source.weight_hash),
        trained_tokens=trainer.tokens,
        seen_tokens=trainer.seen,
        date=datetime.now(UTC).date().isoformat(),
        evaluation=evaluation,
    )
    texts = trainer.answers(0 if card.heads else plan.store_tokens)
    draft = DraftWeights(card, student.weights(), trainer.vocabulary, texts)
    draft.save(plan.out)
    return draft
