"""The general path: any decoder that transformers can run through its attention interface, on our paged attention.

Owns running a slice of a model's layers on packed rows with transformers' own forward code, whose layers are wrapped
(`rows.layer_taps`). Only code that ships with transformers runs, never a model's own. `hf_weights` reads the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from swarm.errors import InvalidRequest, OutOfMemory, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.hf_attention import ATTENTION, BatchContext, ProbedLayer, Visibility, running_as
from swarm_kernels.runtime.hf_experts import EXPERTS
from swarm_kernels.runtime.hf_indexer import choose_keys
from swarm_kernels.runtime.hf_latent import absorb, latent_modules
from swarm_kernels.runtime.hf_linears import Format, weight_bytes
from swarm_kernels.runtime.hf_positions import PositionsAsCache, of_rows
from swarm_kernels.runtime.hf_states import StateMixer, in_order, install, state_cache
from swarm_kernels.runtime.hf_weights import PLAIN_KINDS, STATE_KINDS, MetaModel, load_weights, meta_model
from swarm_kernels.runtime.rope import limited_context
from swarm_kernels.runtime.rows.layer_taps import LayerTap, StopForward, TapState
from swarm_kernels.runtime.rows.wide import WideRows, take_out_unused
from swarm_kernels.runtime.span import Progress, check_layer_range, check_tokens

_COUNT_TOKENS = frozenset({"llama4_text"})
"""Types whose layers take positions from the length of the cache (Llama 4: the temperature of layers without RoPE)."""

_PROBE_ERRORS = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, NotImplementedError)
"""Raised by models that need more than hidden states and positions."""


class HfSpan:
    """See `span.Span`. Use `load`."""

    def __init__(
        self, config: ModelConfig, layers: LayerSpan, form: Format, device: torch.device, model: MetaModel
    ) -> None:
        """`model`: with loaded weights. Raises UnsupportedModel if its layers cannot run on our attention."""
        self.config = config
        self.layers = layers
        self.weight_dtype, self.dtype = form.weights, form.state
        self.compute_dtype = form.compute
        self.device = device
        self.is_first = layers.start == 0
        self.is_last = layers.end == config.num_layers
        self._model = model.causal_lm
        self._decoder = model.decoder
        self._embedding = model.embedding
        self._embedding_size = int(model.embedding.embedding_dim)  # type: ignore[arg-type]
        self.layer_bytes = max(weight_bytes(model.layers[index]) for index in layers)
        self.edge_bytes = weight_bytes(model.causal_lm) - sum(weight_bytes(layer) for layer in model.layers)
        rounding = None if form.compute == form.state else form.state
        self._tap_state = TapState(indexed="index_topk" in config.hf, rounding=rounding)
        if not config.rows.is_plain:
            self._tap_state.wide = WideRows(model.decoder, model.layers[0], config.rows, rounding)
        self._layers = model.layers
        self._mixers: dict[int, StateMixer] = {}
        for index, layer in enumerate(model.layers):
            mixer = install(layer, index, form.packs is not None)
            if mixer is not None and index in layers:
                self._mixers[index] = mixer
            model.layers[index] = LayerTap(layer, index, self._tap_state)
        latent = absorb((self.layer(index) for index in layers if index not in self._mixers), ATTENTION)
        self.index_dim = choose_keys(latent, latent_modules(model.layers))
        self.config = _limited_context(config, chooses=self.index_dim > 0)
        self._find_out_parts()
        probed = self.probe(layers.start, layers.end)
        self._pages = _pages(probed, config.rows.sources, layers)
        self.kv_shape = self._shape_of_all(probed)
        self.visibility = tuple(layer.visibility for layer in probed)
        self._attention_modules = [layer.module for layer in probed]

    @classmethod
    def load(
        cls, source: ModelSource, layers: LayerSpan, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> HfSpan:
        """See `load.load_span`."""
        form = Format.of(dtype, device)
        try:
            model = meta_model(source.config, ATTENTION, form.compute, EXPERTS if form.expert_packs else None)
            take_out_unused(model.causal_lm, model.decoder, source, layers)
            load_weights(model, source, layers, device, progress, form)
        except (MemoryError, torch.OutOfMemoryError):
            raise OutOfMemory(f"layers {layers} do not fit on {device}; serve fewer of them") from None
        return cls(source.config, layers, form, device, model)

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        return self.kv_shape.bytes_per_token_per_layer

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return self.cache_for(max_tokens, 1)

    def cache_for(self, max_tokens: int, sessions: int, dtype: torch.dtype | None = None) -> KVCacheManager:
        """`new_cache` with room for the recurrent states, if there are any, of at least so many sessions. `dtype`: of
        keys and values, if it is another."""
        shape = replace(self.kv_shape, dtype=dtype or self.dtype)
        if None not in self._pages:
            return KVCacheManager(shape, max_tokens, self.device, pages=self._pages)
        planned = 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize  # a token in every layer
        blocks = [page is not None for page in self._pages]
        spared = blocks.count(False) * max_tokens * planned
        return state_cache(shape, max_tokens, self.device, blocks, self._mixers, spared, sessions)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        if not self.is_first:
            raise InvalidRequest(f"layers {self.layers} do not hold the embedding")
        check_tokens(token_ids, self.config.vocab_size)
        ids = torch.tensor([token_ids], dtype=torch.int64, device=self.device)
        if self._tap_state.wide is not None:
            return self._embed_wide(ids, self._tap_state.wide)
        hidden: torch.Tensor = self._embedding(ids)
        return hidden[0]

    def _embed_wide(self, ids: torch.Tensor, wide: WideRows) -> torch.Tensor:
        """Rows before the first layer, by transformers' own forward up to there."""
        if not ids.shape[1]:
            return torch.empty(0, self.config.rows.width(0), dtype=self.compute_dtype, device=self.device)
        wide.begin_embedding()
        with self._tapped(0, 0, None):
            try:
                self._decoder(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
            except StopForward as finished:
                return wide.embedded(finished.hidden)[0]
        raise self._unsupported("transformers does not run its layers one after another")

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
        hidden = hidden.to(device=self.device, dtype=self.compute_dtype)
        if metadata.rows == 0:
            for layer in range(first - self.layers.start, last - self.layers.start):
                if self._pages[layer] is not None and not cache.shares(layer):
                    dispatch.commit_tree_slots(cache.k[layer], cache.v[layer], metadata.copy_from, metadata.copy_to)
            return hidden.new_empty(0, self.config.rows.width(last))
        return self.run_layers(hidden, metadata, cache, first, last, self.visibility)

    def run_layers(
        self,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        cache: KVCacheManager,
        start: int,
        end: int,
        visibility: tuple[Visibility, ...],
    ) -> torch.Tensor:
        """`forward` of at least one row, with the `visibility` of each layer of the span."""
        still = None
        if self.index_dim or self.config.rows.sources:
            still = replace(metadata, copy_from=metadata.copy_from[:0], copy_to=metadata.copy_to[:0])
        if self.index_dim:  # indexers read the cache before the attention would move committed slots
            for layer in range(start - self.layers.start, end - self.layers.start):
                dispatch.commit_tree_slots(cache.k[layer], cache.v[layer], metadata.copy_from, metadata.copy_to)
            metadata = still or metadata
        with running_as(BatchContext(metadata, self.layers.start, cache, visibility, still)):
            return self._forward_layers(hidden, metadata.positions, start, end)

    def run_eager(self, hidden: torch.Tensor, positions: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Layers `[start, end)` without a cache, one sequence, by the attention that `configs` name. What the model
        computes before its layers is computed from random embeddings."""
        embeddings = torch.randn(1, hidden.shape[0], self._embedding_size, dtype=self.compute_dtype, device=self.device)
        lengths = PositionsAsCache(int(positions[0]))
        try:
            return self._forward_layers(hidden, positions, start, end, embeddings, lengths)
        except _PROBE_ERRORS as error:
            raise self._unsupported(_reason(error)) from None

    def layer(self, index: int) -> torch.nn.Module:
        """transformers' layer `index` of the model."""
        layer = self._layers[index].layer
        assert isinstance(layer, torch.nn.Module)
        return layer

    def attention_module(self, index: int) -> torch.nn.Module:
        """The module of layer `index` that looks at other rows."""
        return self._attention_modules[index - self.layers.start]

    def has_state(self, index: int) -> bool:
        """Whether layer `index` has a recurrent state."""
        return index in self._mixers

    def configs(self) -> list[Any]:
        """transformers' configs that the model's modules read, each once."""
        found = {id(module.config): module.config for module in self._model.modules() if hasattr(module, "config")}
        return list(found.values())

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.is_last:
            raise InvalidRequest(f"layers {self.layers} do not hold the head")
        rows = hidden.shape[0]
        if not rows:  # transformers' masks need one
            return torch.empty(0, self.config.vocab_size, device=self.device)
        positions = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        with self._tapped(self.config.num_layers, self.config.num_layers, hidden):
            output = self._model(inputs_embeds=self._placeholder(rows), position_ids=positions, use_cache=False)
        logits: torch.Tensor = output.logits
        return logits[0].float()

    def _forward_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        start: int,
        end: int,
        unused: torch.Tensor | None = None,
        lengths: PositionsAsCache | None = None,
    ) -> torch.Tensor:
        """Run layers `[start, end)` by transformers' own forward. `unused`: embeddings to hand to later layers."""
        if lengths is None and self.config.model_type in _COUNT_TOKENS:
            lengths = of_rows(positions)
        hidden = hidden.to(device=self.device, dtype=self.compute_dtype)
        if start == 0 and self._tap_state.wide is None:
            inputs = hidden[None]
        else:
            inputs = self._placeholder(hidden.shape[0]) if unused is None else unused
        with self._tapped(start, end, hidden):
            try:
                self._decoder(
                    inputs_embeds=inputs, position_ids=positions[None], past_key_values=lengths, use_cache=False
                )
            except StopForward as finished:
                return finished.hidden[0]
        raise self._unsupported("transformers does not run its layers one after another")

    def _placeholder(self, rows: int) -> torch.Tensor:
        """Dummy embeddings of rows whose hidden states are injected later, `[1, rows, width]`."""
        return torch.zeros(1, rows, self._embedding_size, dtype=self.compute_dtype, device=self.device)

    @contextmanager
    def _tapped(self, start: int, end: int, rows: torch.Tensor | None) -> Iterator[None]:
        """`rows`: before layer `start`; None for an embedding."""
        state = self._tap_state
        state.start, state.end = start, end
        if rows is not None:
            rows = rows.to(device=self.device, dtype=self.compute_dtype)
            if state.wide is not None:
                state.hidden = state.wide.begin(rows, start)
            else:
                state.hidden = rows[None] if start else None
        try:
            yield
        finally:
            state.hidden = None

    def _find_out_parts(self) -> None:
        """Run one row through the first layer of the span: what this model's layers return."""
        for guess in (0, 1, 2):
            self._tap_state.parts = guess  # what comes out of the layer corrects it
            try:
                self._probe(self.layers.start, self.layers.start + 1)
                return
            except UnsupportedModel:
                if guess == 2:
                    raise

    def probe(self, start: int, end: int) -> list[ProbedLayer]:
        """Run one row through layers `[start, end)` and record their attention calls, one a layer. Raises
        UnsupportedModel."""
        plain = {index: self.layer(index) for index in range(start, end) if self._is_plain(index)}
        probed = in_order(self._probe(start, end), plain, self.layers.start)
        first = start - self.layers.start
        if [layer.layer for layer in probed] != list(range(first, first + end - start)):
            raise self._unsupported(
                "not every layer attends once through transformers' attention interface"
                + (" or has a recurrent state of a known kind" if self._kinds() & STATE_KINDS else "")
            )
        return probed

    def _is_plain(self, index: int) -> bool:
        """Whether a layer says of itself that its rows see no others."""
        kinds = getattr(self._decoder.config, "layer_types", None) or ()
        return index < len(kinds) and kinds[index] in PLAIN_KINDS

    def _kinds(self) -> set[str]:
        return set(getattr(self._decoder.config, "layer_types", None) or ())

    def _shape_of_all(self, probed: list[ProbedLayer]) -> KvShape:
        """The keys and values of one token in any layer fit into it."""
        all_layers, probed = probed, [layer for layer in probed if layer.heads]
        if not probed:
            return KvShape(min(1, len(all_layers)), 1, 1, self.dtype)
        heads = math.lcm(*{layer.kv_heads for layer in probed})
        if any(layer.heads % heads for layer in probed):
            raise self._unsupported("the key heads of its layers have no common multiple among its query heads")
        latent = any(layer.latent for layer in probed)  # then all are, see `absorb`
        values = self.index_dim if latent else -1
        pages = len(set(self._pages) - {None})
        return KvShape(pages, heads, max(layer.head_dim for layer in probed), self.dtype, values)

    def _probe(self, start: int, end: int) -> list[ProbedLayer]:
        metadata = KVCacheManager(KvShape(1, 1, 1, self.dtype), 1).schedule([])
        batch = BatchContext(metadata, self.layers.start, context=self.config.context_length)
        row = torch.zeros(1, self.config.rows.width(start), dtype=self.compute_dtype, device=self.device)
        position = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            with torch.inference_mode(), running_as(batch):
                self._forward_layers(row, position, start, end)
                if end == self.config.num_layers and self.is_last:
                    self.logits(row[:, : self.config.rows.width(end)])
        except _PROBE_ERRORS as error:
            raise self._unsupported(_reason(error)) from None
        return batch.probed

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"models of type {self.config.model_type} cannot be served in slices: {reason}")


def _pages(probed: list[ProbedLayer], sources: Sequence[int | None], layers: LayerSpan) -> list[int | None]:
    """Of each layer of a span: which keys and values of its cache are its own, or those that it shares."""
    pages: dict[int, int] = {}  # by the layer of the model that makes them
    found: list[int | None] = []
    for layer, of_layer in zip(probed, layers, strict=True):
        source = sources[of_layer] if sources else None
        maker = of_layer if source is None else source
        found.append(pages.setdefault(maker, len(pages)) if layer.heads else None)
    return found


def _limited_context(config: ModelConfig, *, chooses: bool) -> ModelConfig:
    """The context up to which a row does not depend on its batch, nor a layer on more than what is cached.

    An indexer chooses among the keys of a text longer than `index_topk`, by keys of its own: are these cached
    (`chooses`), there is no limit."""
    config = limited_context(config)
    indexed = config.hf.get("index_topk")
    if chooses or not isinstance(indexed, int):
        return config
    return replace(config, context_length=min(config.context_length, indexed))


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
