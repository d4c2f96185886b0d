"""Typed access to a Hugging Face `config.json`: by a key or its aliases, then the default of the type's config class.

Owns those aliases and defaults, which are transformers', and the errors for values that cannot be.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from swarm.errors import CorruptModel

_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "hidden_act": ("activation_function", "hidden_activation"),
}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "max_window_layers": 28,
        "sliding_window": 4096,
    },
    "gemma2": {
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6, "tie_word_embeddings": True,
    },
    "granite": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "olmo3": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "smollm3": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4, "tie_word_embeddings": True,
    },
    "qwen3": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "max_window_layers": 28,
        "sliding_window": 4096, "head_dim": 128,
    },
    "glm4_moe": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "num_experts_per_tok": 4, "attention_bias": True, "rope_theta": 150000.0,
    },
    "granitemoe": {
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "num_experts_per_tok": 2,
    },
    "minimax_m2": {
        "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128,
        "num_experts_per_tok": 8, "rope_theta": 5000000.0,
    },
    "mixtral": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
    },
    "olmoe": {
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8,
    },
    "qwen2_moe": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 16, "max_window_layers": 28,
        "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "qkv_bias": True,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "sliding_window": 4096,
        "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    },
}  # fmt: skip
_MAX_SIZE = 1 << 24
MAX_LAYERS = 1 << 12
_MAX_WORD = 64  # characters of a name that selects what is computed


class ConfigReader:
    """`size`, `number`, `flag` and `word` raise CorruptModel for what is none."""

    def __init__(self, hf: Mapping[str, Any], where: str) -> None:
        kind = hf.get("model_type")
        if not isinstance(kind, str) or not 0 < len(kind) <= _MAX_WORD:
            raise CorruptModel(f"{where} does not name a model_type")
        self.model_type = kind
        self.where = where
        self._hf = hf
        self._defaults = CLASS_DEFAULTS.get(kind, {})

    def get(self, key: str) -> Any:
        for name in (key, *(() if self._defaults else _ALIASES.get(key, ()))):
            if self._hf.get(name) is not None:
                return self._hf[name]
        return None if key in self._hf else self._defaults.get(key)

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        raise CorruptModel(f"{self.where}: {key} is {brief(value)}, not a positive whole number")

    def widest(self, key: str, default: int) -> int:
        """A size, or the largest of one for each layer (Gemma 3n)."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            return self.size(key, default)
        kind = {"model_type": self.model_type}
        return max(ConfigReader({**kind, key: one}, self.where).size(key) for one in value[:MAX_LAYERS])

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        return positive(self.where, key, default if value is None else value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool):
            return value
        raise CorruptModel(f"{self.where}: {key} is {brief(value)}, not true or false")

    def word(self, key: str, default: str) -> str:
        return word(self.where, key, self.get(key) or default)


def positive(where: str, key: str, value: Any) -> float:
    """`value` as a positive finite float, else CorruptModel."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise CorruptModel(f"{where}: {key} is {brief(value)}, not a positive number")


def word(where: str, key: str, value: Any) -> str:
    """`value` as a short text, else CorruptModel."""
    if isinstance(value, str) and len(value) <= _MAX_WORD:
        return value
    raise CorruptModel(f"{where}: {key} is {brief(value)}, not a word")


def brief(value: Any) -> str:
    """`value` in an error; it may be of any size and depth."""
    return reprlib.repr(value)
