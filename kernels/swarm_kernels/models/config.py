"""The shape of a decoder-only model, normalized over file formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FAST_PATH_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
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
    beyond_fast_path: str = ""  # the config's field, if any, with which `LlamaSpan` does not compute
    hf: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kv_elements(self) -> int:
        """Numbers that a token takes in the cache of one layer: keys and values, or, in models with multi-head latent
        attention, a latent and a rotated key, and the key of an indexer if there is one."""
        latent = [self.hf.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim")]
        sizes = [size for size in (*latent, self.hf.get("index_head_dim")) if isinstance(size, int) and size > 0]
        if self.has_fast_path or not all(isinstance(size, int) and size > 0 for size in latent):
            return 2 * self.num_kv_heads * self.head_dim
        return -(-sum(sizes[:2]) // _ALIGNMENT) * _ALIGNMENT + sum(sizes[2:])

    @property
    def has_fast_path(self) -> bool:
        """Whether `LlamaSpan` covers this model exactly; else `HfSpan` runs it."""
        full_window = self.sliding_window is None or self.sliding_window >= self.context_length
        if self.model_type not in FAST_PATH_ARCHITECTURES or self.beyond_fast_path:
            return False
        return self.hidden_act in ("silu", "swish") and full_window
