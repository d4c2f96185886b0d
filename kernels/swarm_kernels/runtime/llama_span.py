"""The fast path: decoders of attention and gated MLPs, or mixtures of experts, on this package's own kernels.

Owns what is read for such a layer, and what happens before the first and after the last one. What a family computes is
in `models.families`, the arithmetic in `ops`, file formats in `models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import InvalidRequest, OutOfMemory
from swarm.types import LayerSpan
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.device.device import activation_dtype, state_dtype
from swarm_kernels.device.transfer import to_device
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape
from swarm_kernels.models.config import DecoderSpec, ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.models.tensor_shapes import SINKS, layer_linears, layer_norms
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int8_linear
from swarm_kernels.ops.base.layer_weights import Activation, plain_linear
from swarm_kernels.ops.base.matrix import Matrix
from swarm_kernels.ops.base.split_experts import HeldExperts
from swarm_kernels.runtime.mixture_reader import prefix_of, read_mixture
from swarm_kernels.runtime.rope import RopeTables, limited_context
from swarm_kernels.runtime.span import Progress, check_layer_range, check_tokens
from swarm_kernels.runtime.weight_reader import Packs, WeightReader, packs_of

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(slots=True)
class LlamaSpan:
    """See `span.Span`. Use `load`."""

    config: ModelConfig
    layers: LayerSpan
    weight_dtype: torch.dtype
    device: torch.device
    weights: list[dispatch.LayerWeights]
    embedding: dispatch.Linear | None  # [vocab, hidden]; the head itself where both are held and tied
    final_norm: torch.Tensor | None  # [hidden]
    head: dispatch.Linear | None  # hidden -> vocab
    rope: RopeTables
    embedding_scale: float
    held: HeldExperts | None = None  # None: all

    @classmethod
    def load(
        cls,
        source: ModelSource,
        layers: LayerSpan,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        like: LlamaSpan | None = None,
        held: HeldExperts | None = None,
    ) -> LlamaSpan:
        """See `load.load_span`."""
        config = limited_context(source.config)
        quantized, state = not dtype.is_floating_point, state_dtype(dtype)
        rounding = None if activation_dtype(state, device) == state else state
        stored = None if quantized else dtype  # they are quantized from what the file has: no wider copy
        packs = packs_of(dtype)
        edge_pack = packs.plain  # 8 bits even for int4: rounding of the head costs the most quality
        reader = WeightReader(source, stored, device)
        is_first, is_last = layers.start == 0, layers.end == config.num_layers
        steps = len(layers) + is_first + is_last
        embedding = norm = head = None
        weights: list[dispatch.LayerWeights] = []
        shared = {} if like is None else dict(zip(like.layers, like.weights, strict=True))
        same_edges = like is not None and (like.is_first, like.is_last) == (is_first, is_last)
        try:
            if like is not None and same_edges:
                embedding, norm, head = like.embedding, like.final_norm, like.head
            elif is_first and like is not None and like.head is not None and _tied(source):
                embedding = like.head
                head = embedding if is_last else None
            elif is_first:
                shared_head = is_last and _tied(source)
                lookup_pack = int8_linear.quantize_linear if quantized else _in_memory
                pack_embedding = edge_pack if shared_head else lookup_pack
                embedding = pack_embedding(reader.matrix(EMBEDDING, config.vocab_size, config.hidden_size), None)
                head = embedding if shared_head else None
            for layer in layers:
                weights.append(shared.get(layer) or _load_layer(reader, config, layer, packs, rounding, held))
                progress((len(weights) + is_first) / steps)
            if is_last and not same_edges:
                norm = _norm(reader, config, FINAL_NORM, config.hidden_size)
                name = EMBEDDING if _tied(source) else HEAD
                head = head or edge_pack(reader.matrix(name, config.vocab_size, config.hidden_size), None)
        except (MemoryError, torch.OutOfMemoryError):
            raise OutOfMemory(f"layers {layers} do not fit on {device}; serve fewer of them") from None
        progress(1.0)
        ropes = (config.rope, *_spec(config).other_ropes)
        rope = RopeTables(ropes, config.head_dim, source.config.context_length, device)
        scale = _embedding_scale(config, state)
        return cls(config, layers, dtype, device, weights, embedding, norm, head, rope, scale, held)

    @property
    def dtype(self) -> torch.dtype:
        return state_dtype(self.weight_dtype)

    @property
    def is_first(self) -> bool:
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        return self.head is not None

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        return self._kv_shape().bytes_per_token_per_layer

    @property
    def layer_bytes(self) -> int:
        return max(weights.nbytes for weights in self.weights)

    @property
    def edge_bytes(self) -> int:
        embedding = None if self.embedding is self.head else self.embedding
        return sum(part.nbytes for part in (embedding, self.final_norm, self.head) if part is not None)

    def _kv_shape(self) -> KvShape:
        return KvShape(len(self.layers), self.config.num_kv_heads, self.config.head_dim, self.dtype)

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return KVCacheManager(self._kv_shape(), max_tokens, self.device)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        if self.embedding is None:
            raise InvalidRequest(f"layers {self.layers} do not hold the embedding")
        check_tokens(token_ids, self.config.vocab_size)
        ids = to_device(torch.tensor(token_ids, dtype=torch.int64), self.device)
        wide = activation_dtype(self.dtype, self.device)
        rows = self.embedding.embedding_rows(ids).to(wide)
        rows = rows if self.embedding_scale == 1 else rows * self.embedding_scale
        return rows.to(self.dtype).to(wide)  # as after each layer

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
        part = slice(first - self.layers.start, last - self.layers.start)
        hidden = to_device(hidden, self.device, activation_dtype(self.dtype, self.device))
        if not metadata.rows:
            for k_blocks, v_blocks in zip(cache.k[part], cache.v[part], strict=True):
                dispatch.commit_tree_slots(k_blocks, v_blocks, metadata.copy_from, metadata.copy_to)
            return hidden
        cos, sin = self.rope.at(metadata.positions, cache.top_position)
        caches = list(zip(cache.k[part], cache.v[part], strict=True))
        return dispatch.decoder_layers(hidden, self.weights[part], cos, sin, caches, metadata)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.final_hidden(hidden)
        assert self.head is not None  # `final_hidden` has checked it
        logits, spec = self.head(normed).float(), _spec(self.config)
        if spec.logit_divisor != 1:
            logits = logits / spec.logit_divisor
        return logits if spec.logit_softcap is None else torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap

    @torch.inference_mode()
    def final_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[m, hidden]` after the last layer -> after the final norm, the input of the head. Raises InvalidRequest."""
        if self.head is None or self.final_norm is None:
            raise InvalidRequest(f"layers {self.layers} do not hold the head")
        hidden = to_device(hidden, self.device, activation_dtype(self.dtype, self.device))
        return dispatch.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)


def _in_memory(weight: Matrix, bias: torch.Tensor | None) -> dispatch.Linear:
    return plain_linear(weight[:], bias)


def _tied(source: ModelSource) -> bool:
    """Whether the head's weights are the embedding's."""
    return source.config.tie_word_embeddings or not source.has(HEAD)


def load_layer(source: ModelSource, layer: int, packs: Packs, held: HeldExperts | None = None) -> dispatch.LayerWeights:
    """The weights of one layer on the CPU, its linear layers prepared by `packs` from fp32. Raises CorruptModel."""
    reader = WeightReader(source, torch.float32, torch.device("cpu"))
    return _load_layer(reader, source.config, layer, packs, held=held)


def _load_layer(
    reader: WeightReader,
    config: ModelConfig,
    layer: int,
    packs: Packs,
    rounding: torch.dtype | None = None,
    held: HeldExperts | None = None,
) -> dispatch.LayerWeights:
    spec = _spec(config)
    kind, prefix, linears = spec.layers[layer], prefix_of(layer), {}
    for field, tensors in layer_linears(config, layer).items():
        names = [f"{prefix}{name}.weight" for name in tensors.names]
        linears[field] = reader.linear(names, tensors.rows, tensors.columns, tensors.bias, packs)
    norms = {
        field: _norm(reader, config, f"{prefix}{name}.weight", size)
        for field, (name, size) in layer_norms(config).items()
    }
    attention = dispatch.Attention(
        qkv=linears["qkv"],
        o=linears["o"],
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if spec.score_scale is None else spec.score_scale,
        q_norm=norms.pop("q_norm", None),
        k_norm=norms.pop("k_norm", None),
        rope=kind.rope,
        window=kind.window,
        softcap=spec.score_softcap,
        sinks=reader.vector(f"{prefix}{SINKS}", config.num_heads) if spec.sinks else None,
    )
    activation = Activation[spec.activation.upper()]
    mlp: dispatch.GatedMlp | dispatch.Mixture
    if kind.mixture:
        assert spec.mixture is not None  # `families` sees to it
        mlp = read_mixture(reader, config, spec.mixture, layer, packs, activation, held)
    else:
        mlp = dispatch.GatedMlp(linears["gate_up"], linears["down"], activation)
    before = {"attn_norm": None, "mlp_norm": None}
    return dispatch.LayerWeights(
        attention,
        mlp,
        eps=config.rms_norm_eps,
        residual_scale=spec.residual_scale,
        rounding=rounding,
        **{**before, **norms},
    )


def _norm(reader: WeightReader, config: ModelConfig, name: str, size: int) -> torch.Tensor:
    """The factors of a norm."""
    weight, offset = reader.vector(name, size), _spec(config).norm_offset
    return weight + offset if offset else weight


def _embedding_scale(config: ModelConfig, states: torch.dtype) -> float:
    spec = _spec(config)
    return float(torch.tensor(spec.embedding_scale, dtype=states if spec.rounds_embedding_scale else torch.float64))


def _spec(config: ModelConfig) -> DecoderSpec:
    assert config.decoder is not None  # `load.load_span` has looked
    return config.decoder
