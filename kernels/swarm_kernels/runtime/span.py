"""A contiguous slice of a decoder, run on packed rows of many sessions.

Owns the `Span` protocol, which covers every model. `span_loading` makes one; `lean` and `general` are its kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from swarm.errors import InvalidRequest
from swarm.types import LayerSpan
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager
from swarm_kernels.models.config import ModelConfig

Progress = Callable[[float], None]
"""Called with the share of the weights loaded so far, 0 to 1."""


class Span(Protocol):
    """Layers `[layers.start, layers.end)` of one model on one device. Calls on one span must not overlap."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layers(self) -> LayerSpan: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of keys, values and the wire."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def kv_bytes_per_token_per_layer(self) -> int: ...

    @property
    def layer_bytes(self) -> int:
        """Bytes of weights one layer holds, the largest of the span's."""
        ...

    @property
    def edge_bytes(self) -> int:
        """Bytes of the embedding, final norm and head this span holds."""
        ...

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        """A cache for all layers of this span, `max_tokens` tokens in all sessions together. Raises OutOfMemory."""
        ...

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Ids -> `[n, hidden]` (first span only). Raises InvalidRequest for an id outside the vocabulary."""
        ...

    def forward(
        self,
        hidden: torch.Tensor,
        plan: AttentionMetadata,
        cache: KVCacheManager,
        start: int | None = None,
        end: int | None = None,
    ) -> torch.Tensor:
        """Run `hidden [n, hidden]` through layers `[start, end)` of the model, the whole span by default.

        Writes keys and values where `plan` says. Any float dtype in; out comes the dtype of the activations. Raises
        InvalidRequest for layers that are not here.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[m, hidden]` as the last layer left them -> fp32 `[m, vocab]` (last span only): final norm, then head."""
        ...


def check_part(layers: LayerSpan, start: int | None, end: int | None) -> tuple[int, int]:
    """The part `[start, end)` of a span, None meaning its own end. Raises InvalidRequest."""
    first = layers.start if start is None else start
    last = layers.end if end is None else end
    if not layers.start <= first < last <= layers.end:
        raise InvalidRequest(f"layers {first}:{last} are asked for, this span holds {layers}")
    return first, last


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest unless every id is in the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequest(f"a token id is outside the vocabulary of {vocab_size}")
