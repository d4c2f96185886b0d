"""Variants of one type's config: every field that changes the arithmetic, tried with values other than its default.

Owns which fields are tried with which values; a variant is tried where the config class has the field.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from zoo.shrink import LAYERS, NotTiny, tiny_config

_FULL, _SLIDING = "full_attention", "sliding_attention"
_VALUES: dict[str, list[Any]] = {
    "sliding_window": [None, 8, 1000],
    "use_sliding_window": [True],
    "layer_types": [[_FULL] * LAYERS, [_SLIDING] * LAYERS, [_SLIDING, _FULL] * (LAYERS // 2)],
    "partial_rotary_factor": [0.5],
    "attn_logit_softcapping": [3.0, None],
    "final_logit_softcapping": [3.0, None],
    "attention_bias": [True],
    "use_qkv_bias": [True],
    "qkv_bias": [True, False],
    "use_bias": [True],
    "mlp_bias": [True],
    "tie_word_embeddings": [True, False],
    "logits_scaling": [4.0],
    "logit_scale": [0.25],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.4],
    "attention_multiplier": [0.2],
    "query_pre_attn_scalar": [7],
    "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False],
    "use_qk_norm": [True, False],
    "qk_layernorm": [True],
    "norm_topk_prob": [True, False],
    "routed_scaling_factor": [2.5],
    "shared_intermediate_size": [0, 40],
    "n_shared_experts": [2],
    "num_shared_experts": [1],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[1]],
    "no_rope_layers": [[1, 0] * (LAYERS // 2)],
    "clip_qkv": [0.5],
    "parallel_attn": [False],
    "use_parallel_residual": [False],
    "hidden_act": ["gelu", "relu"],
    "rope_interleave": [False],
    "attention_k_eq_v": [True],
    "attn_temperature_tuning": [True, False],
    "floor_scale": [16],
    "head_dim": [24],
    "num_key_value_heads": [4, 1],
    "hidden_size_per_layer_input": [0],
    "do_layer_norm_before": [False],
    "word_embed_proj_dim": [32],
}
_ABSENT = object()
_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip


def variants(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and changes, the unchanged config first. Raises NotTiny if there is not even that."""
    plain = tiny_config(kind)
    try:
        text = plain.get_text_config()
    except ValueError as error:  # it has several
        raise NotTiny(str(error).splitlines()[0]) from None
    found: list[tuple[str, dict[str, Any]]] = [("", {})]
    for name, values in _VALUES.items():
        present = _value(text, name)
        if present is not _ABSENT:
            found += [(f"{name}={value}", {name: value}) for value in values if present != value]
    if hasattr(text, "rope_parameters") and not _is_nested(text):
        for rope, values in _ROPES.items():
            found.append((f"rope {rope}", {"rope_parameters": {"rope_type": rope, "rope_theta": 1000.0, **values}}))
        half = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
        found.append(("rope partial", {"rope_parameters": half}))
    return found


def _value(config: PretrainedConfig, name: str) -> Any:
    """Of a field; absent also where layers differ in it, so that it has no one value (Gemma 4)."""
    try:
        return getattr(config, name, _ABSENT)
    except RuntimeError:
        return _ABSENT


def _is_nested(config: PretrainedConfig) -> bool:
    return any(isinstance(value, dict) for value in (config.rope_parameters or {}).values())
