"""Hidden states between a model's layers, in the bytes in which hops send them: what a tapped drafter learns from.

Owns reading them out of a batch, and which layers are recorded. The codec is `runtime.taps`; the drafter sees in
training the 8 bits that it is sent later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarm.errors import CorruptModel
from swarm.types import tapped_row_bytes
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.span import Span
from swarm_kernels.runtime.taps import decode, encode
from swarm_training.distill.corpus import Corpus, RecordedChat
from swarm_training.distill.features import TrainingExample, load_teacher

BITS = 8
_NO_STATES = torch.empty(0)


def tapped_forward(
    span: Span, hidden: torch.Tensor, metadata: AttentionMetadata, cache: KVCacheManager, taps: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers of a whole model. -> its output, and uint8 `[n, len(taps) * row bytes]`."""
    parts, at = [], 0
    for tap in taps:
        if tap > at:
            hidden = span.forward(hidden, metadata, cache, at, tap)
            at = tap
        parts.append(torch.frombuffer(bytearray(encode(hidden, BITS)), dtype=torch.uint8).view(len(hidden), -1))
    if at < span.layers.end:
        hidden = span.forward(hidden, metadata, cache, at, span.layers.end)
    return hidden, torch.cat(parts, 1) if parts else torch.zeros(len(hidden), 0, dtype=torch.uint8)


def tapped_examples(
    source: ModelSource, corpus: Corpus, taps: Sequence[int], device: torch.device, progress: Callable[[float], None]
) -> list[TrainingExample]:
    """The whole corpus, in its order. Chats that were written without these states are read by the model once more, and
    the states kept beside them. Raises as `load_span`, CorruptModel for a damaged corpus."""
    made: list[TrainingExample] = []
    span: Span | None = None
    for number in range(len(corpus)):
        chats, recorded = list(corpus.shard(number)), corpus.taps(number)
        if set(taps) <= set(recorded):
            rows = [_columns(chat.taps, recorded, taps, source.config.hidden_size) for chat in chats]
        else:
            path = corpus.folder / f"taps-{'-'.join(map(str, taps))}-{number:05d}.safetensors"
            if not path.is_file():
                span = span or load_teacher(source, source.config.num_layers, device)
                part = path.with_suffix(".part")
                save_file({"taps": torch.cat([_run(span, chat, taps) for chat in chats])}, part)
                part.replace(path)
            rows = list(torch.split(_stored(path), [len(chat) for chat in chats]))
        made += [TrainingExample(replace(chat, taps=kept), _NO_STATES) for chat, kept in zip(chats, rows, strict=True)]
        progress((number + 1) / len(corpus))
    return made


def _columns(rows: torch.Tensor, recorded: Sequence[int], taps: Sequence[int], hidden_size: int) -> torch.Tensor:
    """Of the recorded layers those of `taps`."""
    if tuple(recorded) == tuple(taps):
        return rows
    size = tapped_row_bytes(hidden_size, BITS)
    starts = [size * list(recorded).index(tap) for tap in taps]
    return torch.cat([rows[:, start : start + size] for start in starts], 1)


def _run(span: Span, chat: RecordedChat, taps: Sequence[int]) -> torch.Tensor:
    cache = span.new_cache(len(chat) + 16)
    cache.open(b"chat", len(chat))
    metadata = cache.schedule([StepRequest(b"chat", 0, len(chat))])
    return tapped_forward(span, span.embed(chat.tokens.tolist()), metadata, cache, taps)[1]


def _stored(path: Path) -> torch.Tensor:
    try:
        return load_file(path)["taps"]
    except (OSError, SafetensorError, KeyError):
        raise CorruptModel(f"{path} cannot be read; remove it") from None


def read_taps(rows: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """uint8 `[n, taps * row bytes]` -> fp32 `[n, taps * hidden]`; what is not finite becomes 0."""
    size = tapped_row_bytes(hidden_size, BITS)
    parts = [part.contiguous().numpy().tobytes() for part in torch.split(rows, size, 1)]
    tapped = torch.cat([decode(part, hidden_size, BITS) for part in parts], -1)
    return torch.where(torch.isfinite(tapped), tapped, 0.0)
