"""Any decoder type of transformers as a tiny config: which of its sizes to shrink, and to what.

Owns sizes only; `families` and `variants` own what is tried with them.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = 4
VOCABULARY = 256
CONTEXT = 256

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 192,
    "sliding_window": 24,
    "attention_chunk_size": 24,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_chunk_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "intermediate_size_mlp": 48,
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": CONTEXT,
    "n_ctx": CONTEXT,
    "d_model": 64,
    "n_layers": LAYERS,
    "n_heads": 4,
    "max_seq_len": CONTEXT,
    "ffn_dim": 48,
    "decoder_layers": LAYERS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "num_layers": LAYERS,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "rotary_dim": 8,
    "num_key_value_groups": 2,
    "max_window_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Values for keys of this name, whatever the type; `None` token ids, so that nothing stops early."""


_MLA = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention: every head has keys of its own
_BY_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash", "minicpm3",
         "axk1", "axk2", "kimi_linear", "youtu"),
        _MLA,
    ),
    "qwen2_moe": {"sliding_window": 24, "use_sliding_window": False},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0, "global_head_dim": 24,
        "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1,
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 24},
    "dots1": {"n_shared_experts": 1, "max_window_layers": 2},
    "llama4_text": {"layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
    "cohere2": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {**_MLA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "bailing_hybrid": {**_MLA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {"hybrid_override_pattern": "M-*E", "num_hidden_layers": 4},
}  # fmt: skip


class NotTiny(Exception):
    """transformers makes no small causal decoder of this type from plain sizes."""


def tiny_config(kind: str, **changes: Any) -> PretrainedConfig:
    """The config of transformers' `kind` with small sizes. Nested text configs are shrunk likewise. Raises NotTiny."""
    cls = CONFIG_MAPPING[kind]
    try:
        known = set(cls().to_dict())
        nested = "text_config" in known
        sizes = {k: v for k, v in SIZES.items() if k in known or k in getattr(cls, "attribute_map", {})}
        if nested:
            text = cls().text_config
            sizes = {**sizes, "text_config": tiny_config(text.model_type, **changes).to_dict()}
            return AutoConfig.for_model(kind, **sizes)
        sizes = _without_aliases(sizes, getattr(cls, "attribute_map", {}))
        return AutoConfig.for_model(kind, **{**sizes, **_BY_TYPE.get(kind, {}), **changes})
    except Exception as error:  # noqa: BLE001 - a config class rejects sizes in whatever way it likes
        raise NotTiny(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None


def _without_aliases(sizes: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """One name for each attribute: transformers rejects a value given twice."""
    return {k: v for k, v in sizes.items() if k not in aliases or aliases[k] not in sizes}
