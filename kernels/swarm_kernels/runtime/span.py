"""A contiguous slice of a decoder, run on packed rows of many sessions.

Owns the `Span` protocol, which covers every model. `load` makes one: a `LlamaSpan` or an `HfSpan`.
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
"""Called with the fraction of the weights loaded so far, 0 to 1."""


class Span(Protocol):
    """Layers `[layers.start, layers.end)` of one model on one device. Calls on one span must not overlap."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layers(self) -> LayerSpan: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of keys, values and hidden states on the wire."""
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
        """Bytes of weights one layer holds, the maximum over the span."""
        ...

    @property
    def edge_bytes(self) -> int:
        """Bytes of the embedding, final norm and head this span holds."""
        ...

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        """A KV cache for all layers of this span, `max_tokens` tokens over all sessions. Raises OutOfMemory."""
        ...

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Ids -> rows before layer 0, `[n, width]` (first span only). Raises InvalidRequest for an id outside the
        vocabulary."""
        ...

    def forward(
        self,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        cache: KVCacheManager,
        start: int | None = None,
        end: int | None = None,
    ) -> torch.Tensor:
        """Run rows `[n, width]` through layers `[start, end)` of the model, the whole span by default. Rows are hidden
        states in nearly all models; see `models.row_layout`.

        Writes keys and values to the slots of `metadata`. Takes any float dtype and returns that of the activations.
        Raises InvalidRequest for layers outside this span.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[m, hidden]` after the last layer -> fp32 `[m, vocab]` (last span only): final norm, then head."""
        ...


def check_layer_range(layers: LayerSpan, start: int | None, end: int | None) -> tuple[int, int]:
    """The layers `[start, end)` within a span; None means the span's own bound. Raises InvalidRequest."""
    first = layers.start if start is None else start
    last = layers.end if end is None else end
    if not layers.start <= first < last <= layers.end:
        raise InvalidRequest(f"layers {first}:{last} were requested, this span holds {layers}")
    return first, last


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest unless every id is in the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequest(f"a token id is outside the vocabulary of {vocab_size}")
