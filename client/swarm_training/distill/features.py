"""Inputs and targets of a student: the target's own states over a chat, and the teacher's predictions.

Owns running the target's layers below the student, caching their states on disk, and batching of chats.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import EMBEDDING, LlamaSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from swarm_training.distill.corpus import ANSWER, Corpus, RecordedChat

CHATS_PER_FORWARD = 8


@dataclass(frozen=True, slots=True, eq=False)
class TrainingExample:
    """A chat and the student's input: `states [n, hidden]`, bf16."""

    chat: RecordedChat
    states: torch.Tensor


def load_teacher(source: ModelSource, layers: int, device: torch.device) -> Span:
    """The target's first `layers`, in 8 bits on a CPU: a third faster, nearly the same output. Raises as
    `load_span`."""
    dtype = torch.int8 if device.type == "cpu" else torch.bfloat16
    return load_span(source, LayerSpan(0, layers), dtype, device)


class Features:
    """States after the target's first `base` layers (0: the embedding); after all of them, with the final norm."""

    def __init__(self, source: ModelSource, base: int, device: torch.device) -> None:
        self._source, self._base, self._device = source, base, device
        self._embedding = None if base else source.tensor(EMBEDDING).float()
        self._span: Span | None = None  # loaded when states are missing on disk

    def examples(
        self, corpus: Corpus, progress: Callable[[float], None] = lambda fraction: None
    ) -> list[TrainingExample]:
        """Of the whole corpus, in its order. Computed states are cached in its folder and memory-mapped. Raises as
        `load_span`, CorruptModel for a damaged corpus."""
        made: list[TrainingExample] = []
        for number in range(len(corpus)):
            chats = list(corpus.shard(number))
            path = corpus.folder / f"states-{self._base:02d}-{number:05d}.safetensors"
            made += map(
                TrainingExample, chats, self.of(chats) if self._embedding is not None else self._cached(chats, path)
            )
            progress((number + 1) / len(corpus))
        self._span = None
        return made

    def of(self, chats: Sequence[RecordedChat]) -> list[torch.Tensor]:
        """`[n, hidden]` bf16 for each chat. Raises as `load_span`."""
        if self._embedding is not None:
            return [self._embedding[chat.tokens.long()].bfloat16() for chat in chats]
        parts = [chats[i : i + CHATS_PER_FORWARD] for i in range(0, len(chats), CHATS_PER_FORWARD)]
        return [rows for part in parts for rows in self._run(part)]

    def _cached(self, chats: Sequence[RecordedChat], path: Path) -> Sequence[torch.Tensor]:
        sizes = [len(chat) for chat in chats]
        try:
            states = load_file(path)["states"]
            if states.shape == (sum(sizes), self._source.config.hidden_size):
                return torch.split(states, sizes)
        except (OSError, SafetensorError, KeyError):
            pass  # none yet, or a run was interrupted: compute them again
        part = path.with_suffix(".part")
        save_file({"states": torch.cat(self.of(chats))}, part)
        os.replace(part, path)
        return torch.split(load_file(path)["states"], sizes)

    def _run(self, chats: Sequence[RecordedChat]) -> list[torch.Tensor]:
        span = self._span = self._span or load_teacher(self._source, self._base, self._device)
        sizes = [len(chat) for chat in chats]
        cache = span.new_cache(sum(sizes) + 16 * len(sizes))
        keys = [number.to_bytes(2, "little") for number in range(len(chats))]
        for key, size in zip(keys, sizes, strict=True):
            cache.open(key, size)
        metadata = cache.schedule([StepRequest(key, 0, size) for key, size in zip(keys, sizes, strict=True)])
        tokens = [token for chat in chats for token in chat.tokens.tolist()]
        hidden = span.forward(span.embed(tokens), metadata, cache)
        if isinstance(span, LlamaSpan) and span.is_last:
            hidden = span.final_hidden(hidden)
        return [rows.bfloat16().cpu().clone() for rows in torch.split(hidden, sizes)]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTopK:
    """The positions of a batch with a target token further on, and the teacher's prediction of it.

    Only the `m` tokens of answers are targets, as only answers are drafted.
    """

    mask: torch.Tensor  # [b, n] bool, m of them set
    ids: torch.Tensor  # [m, TOP] the teacher's likeliest tokens
    logprobs: torch.Tensor  # [m, TOP]

    @classmethod
    def of(cls, examples: Sequence[TrainingExample], ahead: int, device: torch.device) -> TeacherTopK:
        """Position i predicts token i + `ahead`, if it and all from i + 1 on are of one answer."""
        mask = torch.zeros(len(examples), max(len(example.chat) for example in examples), dtype=torch.bool)
        ids, logprobs = [], []
        for row, example in enumerate(examples):
            chat = example.chat
            positions = max(0, len(chat) - ahead)
            answer = chat.origin[1:] == ANSWER
            answered = torch.stack([answer[step : step + positions] for step in range(ahead)]).all(0)
            mask[row, :positions] = answered
            ids.append(chat.top_ids[ahead:][answered])
            logprobs.append(chat.top_logprobs[ahead:][answered].float())
        parts = (mask, torch.cat(ids).long(), torch.cat(logprobs))
        return cls(*(part.to(device) for part in parts))


def padded_states(examples: Sequence[TrainingExample], device: torch.device) -> torch.Tensor:
    """`[b, n, hidden]` fp32, `n` the longest chat's."""
    return torch.nn.utils.rnn.pad_sequence([example.states.float() for example in examples], batch_first=True).to(
        device
    )
