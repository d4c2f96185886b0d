"""The general path: any decoder that transformers can run through its attention interface, on our paged attention.

Owns running a slice of a model's layers on packed rows with transformers' own forward code. Each decoder layer is
wrapped by a `_LayerTap`: taps before the slice pass their input through, the one right before it injects our hidden
states, and the last one of the slice stops the forward. So whatever a model does around its layers (positions, scales,
logit caps) stays transformers' code. Only code that ships with transformers runs, never a model's own.

`hf_weights` reads the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface

from swarm.errors import InvalidRequest, OutOfMemory, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.hf_weights import MetaModel, load_weights, meta_model
from swarm_kernels.runtime.span import Progress, check_layer_range, check_tokens

ATTENTION = "swarm"
"""Our name in transformers' attention interface."""

_IGNORED = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
                      "output_hidden_states", "position_embeddings", "return_dict", "logits_to_keep"})  # fmt: skip
"""Arguments of the interface that AttentionMetadata implies; any other that is set would change the result."""

_PROBE_ERRORS = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, NotImplementedError)
"""Raised by models that need more than hidden states and positions."""


@dataclass(slots=True)
class _BatchContext:
    """Context of the attention calls while a batch runs."""

    metadata: AttentionMetadata
    cache: KVCacheManager | None  # None while probing: record shapes, compute nothing
    first_layer: int
    probed: list[tuple[int, int, int]] = field(default_factory=list)  # (layer of the span, key heads, head size)


_running: ContextVar[_BatchContext] = ContextVar("swarm_running")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query [1, H, n, D]`, `key`, `value` `[1, G, n, D]` -> `[1, n, H, D]`."""
    unknown = [name for name, given in others.items() if name not in _IGNORED and given is not None]
    if attention_mask is not None or unknown:
        raise UnsupportedModel(f"its attention needs {', '.join(unknown) or 'an attention mask'}")
    batch = _running.get()
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if value_dim < key_dim:  # smaller values than keys (multi-head latent attention): the cache holds both at one size
        v = torch.nn.functional.pad(v, (0, key_dim - value_dim))
    layer = int(module.layer_idx) - batch.first_layer  # type: ignore[arg-type]
    if batch.cache is None:
        batch.probed.append((layer, k.shape[1], key_dim))
        return q[None, ..., :value_dim], None
    scale = key_dim**-0.5 if scaling is None else scaling
    attended = dispatch.attend(
        q, k, v, batch.cache.k[layer], batch.cache.v[layer], batch.metadata, scale, sliding_window, softcap
    )
    return attended[None, ..., :value_dim], None


AttentionInterface.register(ATTENTION, _attention)


class _StopForward(Exception):
    """Stops transformers' forward after the last requested layer. Never leaves this module."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class _TapState:
    """State shared by the taps of one model during a forward."""

    start: int = 0
    end: int = 0
    hidden: torch.Tensor | None = None  # injected before layer `start`
    tuples: bool = False  # whether this model's layers return tuples
    probe: torch.nn.Module | None = None  # runs in place of layer 0, to find out `tuples`


class _LayerTap(torch.nn.Module):
    """Replaces layer `index`; attributes that the model reads from its layers are the wrapped layer's."""

    def __init__(self, layer: torch.nn.Module, index: int, state: _TapState) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.state = state

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        if state.start <= self.index < state.end:
            output = (state.probe or self.layer)(hidden, *args, **kwargs)
            if self.index == state.end - 1:
                state.tuples = isinstance(output, tuple)
                raise _StopForward(output[0] if state.tuples else output)
            return output
        if self.index == state.start - 1 and state.hidden is not None:
            hidden = state.hidden
        return (hidden,) if state.tuples else hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class HfSpan:
    """See `span.Span`. Use `load`."""

    def __init__(
        self, config: ModelConfig, layers: LayerSpan, dtype: torch.dtype, device: torch.device, model: MetaModel
    ) -> None:
        """`model`: with loaded weights. Raises UnsupportedModel if its layers cannot run on our attention."""
        self.config = config
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self.is_first = layers.start == 0
        self.is_last = layers.end == config.num_layers
        self._model = model.causal_lm
        self._decoder = model.decoder
        self._embedding = model.embedding
        self._embedding_size = int(next(model.embedding.parameters()).shape[-1])
        self.layer_bytes = max(_nbytes(model.layers[index]) for index in layers)
        self.edge_bytes = _nbytes(model.causal_lm) - sum(_nbytes(layer) for layer in model.layers)
        self._tap_state = _TapState()
        first_layer = model.layers[layers.start]
        for index, layer in enumerate(model.layers):
            model.layers[index] = _LayerTap(layer, index, self._tap_state)
        self._kv_heads, self._head_dim = self._probe(first_layer)

    @classmethod
    def load(
        cls, source: ModelSource, layers: LayerSpan, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> HfSpan:
        """See `load.load_span`."""
        if not dtype.is_floating_point:
            raise UnsupportedModel(f"models of type {source.config.model_type} are not served in 8 or 4 bits; use bf16")
        try:
            model = meta_model(source.config, ATTENTION, dtype)
            load_weights(model, source, layers, device, progress)
        except (MemoryError, torch.OutOfMemoryError):
            raise OutOfMemory(f"layers {layers} do not fit on {device}; serve fewer of them") from None
        return cls(_limited_to_trained_context(source.config), layers, dtype, device, model)

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        return self._kv_shape().bytes_per_token_per_layer

    def _kv_shape(self) -> KvShape:
        return KvShape(len(self.layers), self._kv_heads, self._head_dim, self.dtype)

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return KVCacheManager(self._kv_shape(), max_tokens, self.device)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        if not self.is_first:
            raise InvalidRequest(f"layers {self.layers} do not hold the embedding")
        check_tokens(token_ids, self.config.vocab_size)
        hidden: torch.Tensor = self._embedding(torch.tensor([token_ids], dtype=torch.int64, device=self.device))
        return hidden[0]

    @torch.inference_mode()
    def forward(
        self,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        cache: KVCacheManager,
        start: int | None = None,
        end: int | None = None,
    ) -> torch.Tensor:
        first, last = check_layer_range(self.layers, start, end)
        hidden = hidden.to(device=self.device, dtype=self.dtype)
        if metadata.rows == 0:
            part = slice(first - self.layers.start, last - self.layers.start)
            for k_blocks, v_blocks in zip(cache.k[part], cache.v[part], strict=True):
                dispatch.commit_tree_slots(k_blocks, v_blocks, metadata.copy_from, metadata.copy_to)
            return hidden
        with _running_as(_BatchContext(metadata, cache, self.layers.start)):
            return self._forward_layers(hidden, metadata.positions, first, last)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.is_last:
            raise InvalidRequest(f"layers {self.layers} do not hold the head")
        rows = hidden.shape[0]
        positions = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        with self._tapped(self.config.num_layers, self.config.num_layers, hidden):
            output = self._model(inputs_embeds=self._placeholder(rows), position_ids=positions, use_cache=False)
        logits: torch.Tensor = output.logits
        return logits[0].float()

    def _forward_layers(self, hidden: torch.Tensor, positions: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Run layers `[start, end)` by transformers' own forward."""
        inputs = hidden[None] if start == 0 else self._placeholder(hidden.shape[0])
        with self._tapped(start, end, hidden):
            try:
                self._decoder(inputs_embeds=inputs, position_ids=positions[None], use_cache=False)
            except _StopForward as finished:
                return finished.hidden[0]
        raise self._unsupported("transformers does not run its layers one after another")

    def _placeholder(self, rows: int) -> torch.Tensor:
        """Dummy embeddings of rows whose hidden states are injected later, `[1, rows, width]`."""
        return torch.zeros(1, rows, self._embedding_size, dtype=self.dtype, device=self.device)

    @contextmanager
    def _tapped(self, start: int, end: int, hidden: torch.Tensor) -> Iterator[None]:
        state = self._tap_state
        state.start, state.end = start, end
        state.hidden = hidden.to(device=self.device, dtype=self.dtype)[None] if start else None
        try:
            yield
        finally:
            state.hidden = None

    def _probe(self, first_layer: torch.nn.Module) -> tuple[int, int]:
        """Run one row through every layer of the span and record its attention calls. -> (key heads, head size)."""
        metadata = KVCacheManager(KvShape(1, 1, 1, self.dtype), 1).schedule([])
        batch = _BatchContext(metadata, None, self.layers.start)
        row = torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=self.device)
        position = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            with torch.inference_mode(), _running_as(batch):
                self._tap_state.probe = first_layer
                self._forward_layers(row, position, 0, 1)
                self._tap_state.probe = None
                batch.probed.clear()
                self._forward_layers(row, position, self.layers.start, self.layers.end)
                if self.is_last:
                    self.logits(row)
        except _PROBE_ERRORS as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self._unsupported(reason) from None
        layers = [layer for layer, _, _ in batch.probed]
        shapes = {(heads, size) for _, heads, size in batch.probed}
        if layers != list(range(len(self.layers))) or len(shapes) != 1:
            raise self._unsupported("not every layer attends once, with keys of the same shape")
        return shapes.pop()

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"models of type {self.config.model_type} cannot be served in slices: {reason}")


def _limited_to_trained_context(config: ModelConfig) -> ModelConfig:
    """LongRoPE switches all frequencies once a sequence outgrows the trained context, so a row would depend on its
    batch: such a model is served up to the trained context only."""
    scaling = config.rope.scaling or {}
    trained = scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type") != "longrope" or not isinstance(trained, int):
        return config
    return replace(config, context_length=min(config.context_length, trained))


def _nbytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if p.device.type != "meta")


@contextmanager
def _running_as(batch: _BatchContext) -> Iterator[None]:
    token = _running.set(batch)
    try:
        yield
    finally:
        _running.reset(token)
