"""What a student is shown and asked: the target's first layers over a chat, and the teacher's expectations.

Owns running the target's untrained first layers and laying chats out as batches. Knows no optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.types import LayerSpan
from swarm_kernels.distill.corpus import ANSWER, Chat
from swarm_kernels.kv_cache import RowsRequest
from swarm_kernels.lean import EMBEDDING
from swarm_kernels.model_source import ModelSource
from swarm_kernels.span_loading import load_span

_CHATS_A_PASS = 8


class Features:
    """Hidden states after the target's first `base` layers (0: the embedding), fp32, as a client computes them."""

    def __init__(self, source: ModelSource, base: int) -> None:
        """Raises as `load_span`."""
        self._span = load_span(source, LayerSpan(0, base), torch.bfloat16) if base else None
        self._embedding = None if base else source.tensor(EMBEDDING).float()

    def of(self, chats: Sequence[Chat]) -> list[torch.Tensor]:
        """`[n, hidden]` bf16 for each chat, to be kept."""
        if self._embedding is not None:
            return [self._embedding[chat.tokens.long()].bfloat16() for chat in chats]
        parts = [chats[i : i + _CHATS_A_PASS] for i in range(0, len(chats), _CHATS_A_PASS)]
        return [rows for part in parts for rows in self._run(part)]

    def _run(self, chats: Sequence[Chat]) -> list[torch.Tensor]:
        span = self._span
        if span is None or not chats:
            return []
        sizes = [len(chat) for chat in chats]
        cache = span.new_cache(sum(sizes) + 16 * len(sizes))
        keys = [number.to_bytes(2, "little") for number in range(len(chats))]
        for key, size in zip(keys, sizes, strict=True):
            cache.open(key, size)
        plan = cache.plan([RowsRequest(key, 0, size) for key, size in zip(keys, sizes, strict=True)])
        tokens = [token for chat in chats for token in chat.tokens.tolist()]
        hidden = span.forward(span.embed(tokens), plan, cache)
        return [rows.bfloat16().clone() for rows in torch.split(hidden, sizes)]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """`b` chats padded to `n` places; place i asks for token i + 1. Only the `m` tokens of answers are asked for: only
    answers are drafted."""

    hidden: torch.Tensor  # [b, n, hidden]
    asked: torch.Tensor  # [b, n] bool, m of them set
    ids: torch.Tensor  # [m, TOP] the teacher's likeliest tokens
    logprobs: torch.Tensor  # [m, TOP]

    @classmethod
    def of(cls, chats: Sequence[Chat], features: Sequence[torch.Tensor], device: torch.device) -> Batch:
        longest = max(len(chat) for chat in chats)
        hidden = torch.zeros(len(chats), longest, features[0].shape[1], device=device)
        asked = torch.zeros(len(chats), longest, dtype=torch.bool)
        ids, logprobs = [], []
        for row, (chat, states) in enumerate(zip(chats, features, strict=True)):
            hidden[row, : len(chat)] = states.to(device)
            answer = chat.origin[1:] == ANSWER
            asked[row, : len(chat) - 1] = answer
            ids.append(chat.top_ids[1:][answer])
            logprobs.append(chat.top_logprobs[1:][answer])
        parts = (asked, torch.cat(ids).long(), torch.cat(logprobs).float())
        return cls(hidden, *(part.to(device) for part in parts))
