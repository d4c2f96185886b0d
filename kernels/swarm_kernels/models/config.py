"""The shape of a decoder-only model, normalized over file formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm_kernels.models.row_layout import RowLayout

FAST_PATH_ARCHITECTURES = frozenset({
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "phi3", "smollm3",
    "glm4_moe", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
})  # fmt: skip
"""`model_type`s that `LlamaSpan` runs; SmolLM and SmolLM2 are `llama`. All others run on transformers' layers."""


_ALIGNMENT = 16  # of a latent key, see `runtime.hf_latent`


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `inv_freq` derives from `theta`, `dim` and `scaling` (keys of Hugging Face's
    `rope_scaling`)."""

    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None  # {"rope_type": "linear" | "llama3" | "yarn" | "dynamic" ..., ...}
    dim: int | None = None  # rotated dimensions of a head; None: all of them


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer's attention sees, and how it rotates."""

    window: int | None = None  # keys at a smaller distance; None: all
    rope: int | None = 0  # 0: `ModelConfig.rope`, above: `DecoderSpec.other_ropes`; None: no rotation
    mixture: bool = False  # its MLP is `DecoderSpec.mixture`


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """The mixture of experts in some layers of a decoder. What the fields of routing do is in `ops.base.routing`, those
    of gating in `ops.base.experts`."""

    experts: int
    chosen: int
    width: int  # inside an expert
    scores: str = "softmax"  # or sigmoid, softmax_of_chosen
    normalized: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    used_groups: int = 1
    correction: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    interleaved: bool = False  # experts are stored transposed, their gates and ups in turns (gpt-oss)
    gating: tuple[float, float, float] = (1.0, math.inf, 0.0)  # alpha, limit, shift
    shared_width: int = 0  # inside the shared expert; 0: there is none
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer by their names in model files; "" for one that it does not have."""

    attn: str = "input_layernorm"
    attn_post: str = ""
    mlp: str = "post_attention_layernorm"
    mlp_post: str = ""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What a decoder of attention and gated MLPs, or mixtures of them, computes, beside the sizes in `ModelConfig`. The
    defaults are Llama's."""

    layers: tuple[LayerSpec, ...]
    norms: NormNames = NormNames()
    norm_offset: float = 0.0  # added to the stored weights of every norm (Gemma)
    whole_qk_norm: bool = False  # queries and keys are normed over all heads at once (OLMo 2)
    fused: bool = False  # one tensor holds queries, keys and values, one gates and ups (Phi-3)
    activation: str = "silu"  # or gelu_tanh, gelu
    mixture: MixtureSpec | None = None
    sinks: bool = False  # of attention (gpt-oss)
    other_ropes: tuple[RopeConfig, ...] = ()
    score_scale: float | None = None  # None: head_dim ** -0.5
    score_softcap: float | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the dtype of the hidden states (Gemma)
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is Llama's or Qwen's, full attention and all."""
        return self == DecoderSpec((LayerSpec(),) * len(self.layers))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model. `hf` is the Hugging Face config it came from, or an equivalent made from GGUF metadata."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head (Qwen3)
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    decoder: DecoderSpec | None = None  # what `LlamaSpan` computes; None: it does not know this model
    beyond_fast_path: str = ""  # the config's field, if any, with which `LlamaSpan` does not compute
    layout: RowLayout | None = None  # of rows between layers, where these are more than hidden states, or keys differ
    hf: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> RowLayout:
        """What rows between layers are made of."""
        return self.layout or RowLayout(self.hidden_size, self.num_layers)

    @property
    def kv_elements(self) -> int:
        """Numbers that a token takes in the cache of one layer: keys and values, or, in models with multi-head latent
        attention, a latent and a rotated key, and the key of an indexer if there is one."""
        if self.layout is not None:
            return self.layout.kv_elements
        latent = [self.hf.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim")]
        sizes = [size for size in (*latent, self.hf.get("index_head_dim")) if isinstance(size, int) and size > 0]
        if self.has_fast_path or not all(isinstance(size, int) and size > 0 for size in latent):
            return 2 * self.num_kv_heads * self.head_dim
        return -(-sum(sizes[:2]) // _ALIGNMENT) * _ALIGNMENT + sum(sizes[2:])

    @property
    def inner_widths(self) -> tuple[int, ...]:
        """Of the gated MLPs in its layers, shared experts among them. It has a fast path."""
        assert self.decoder is not None
        mixture = self.decoder.mixture
        dense = any(not layer.mixture for layer in self.decoder.layers)
        shared = mixture.shared_width if mixture is not None else 0
        return (*((self.intermediate_size,) if dense else ()), *((shared,) if shared else ()))

    @property
    def has_fast_path(self) -> bool:
        """Whether `LlamaSpan` covers this model exactly; else `HfSpan` runs it."""
        return self.decoder is not None

    @property
    def is_mixture(self) -> bool:
        """Whether it has a fast path on which some layers have a mixture of experts."""
        return self.decoder is not None and self.decoder.mixture is not None

    @property
    def is_llama_like(self) -> bool:
        """Whether it is Llama or Qwen with full attention: what drafts are made of."""
        return self.decoder is not None and self.decoder.is_plain
