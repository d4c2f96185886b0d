"""Which fields of a Hugging Face config a model type knows, and which change the arithmetic of some other decoder.

Owns the refusal of fields that matter elsewhere but that transformers would pass over in silence. What the values of
known fields mean is in `families` and `rope_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

LLAMA_FIELDS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings", "attention_bias", "mlp_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
})  # fmt: skip
"""What is read of every family; a class that has no such field passes over it."""

_GEMMA = frozenset({
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "use_bidirectional_attention",
})  # fmt: skip
_GRANITE = frozenset({"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"})
_MIXTURE = frozenset({"num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts"})
_QWEN_MOE = frozenset({"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"})
_FAMILY_FIELDS: Mapping[str, frozenset[str]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"sliding_window_pattern", "rope_local_base_freq"},
    "granite": _GRANITE,
    "phi3": frozenset({"partial_rotary_factor"}),
    "smollm3": frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    "glm4_moe": _MIXTURE | {
        "moe_intermediate_size", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
        "first_k_dense_replace", "use_qk_norm", "partial_rotary_factor",
    },
    "gpt_oss": _MIXTURE | {"swiglu_alpha", "swiglu_limit"},
    "granitemoe": _MIXTURE | _GRANITE,
    "minimax_m2": _MIXTURE | {"rotary_dim", "partial_rotary_factor", "use_qk_norm"},
    "mixtral": _MIXTURE,
    "olmoe": _MIXTURE | {"clip_qkv", "norm_topk_prob"},
    "qwen2_moe": _MIXTURE | _QWEN_MOE | {"shared_expert_intermediate_size", "qkv_bias"},
    "qwen3_moe": _MIXTURE | _QWEN_MOE,
}  # fmt: skip

"""What `families` reads beside the fields that all share."""

HARMLESS_FIELDS = frozenset({
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp",
    "attention_dropout", "resid_pdrop", "embd_pdrop", "model_type", "architectures", "dtype", "torch_dtype",
    "transformers_version", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "num_mtp_layers",
})  # fmt: skip
"""Fields of the Llama-like classes that change no answer."""

_ARITHMETIC: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "alibi", "use_alibi", "attention_multiplier", "attn_logit_softcapping", "attn_temperature_tuning", "clip_qkv",
        "final_logit_softcapping", "no_rope_layers", "no_rope_layer_interval", "parallel_attn", "qk_layernorm",
        "query_pre_attn_scalar", "rope_interleaved", "scale_depth", "use_mup", "use_qk_norm", "use_parallel_residual",
        "use_residual_scaling",
    ), ()),
    **dict.fromkeys((
        "embedding_multiplier", "embedding_scale", "logit_scale", "logits_scaling", "lm_head_multiplier", "num_experts",
        "num_local_experts", "n_routed_experts", "moe_num_experts", "residual_multiplier", "scale_emb",
    ), (1,)),
}  # fmt: skip
"""Fields by which some decoders compute, with the values beside None, False, 0 and empty ones that change nothing."""


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""One fact under several names: a type that knows one of them computes with a mixture."""


def known_fields(kind: str) -> frozenset[str]:
    """Of a type that `LlamaSpan` runs: what its answers depend on, and what is known not to change them."""
    return LLAMA_FIELDS | _FAMILY_FIELDS.get(kind, frozenset()) | HARMLESS_FIELDS


def unknown_arithmetic(hf: Mapping[str, Any], known: Collection[str]) -> str:
    """The first field of `hf` that changes what other decoders compute, and that is not among the fields `known` to
    this one; "" for none."""
    experts_known = any(name in known for name in _EXPERTS)
    for key, neutral in _ARITHMETIC.items():
        if key in known or key not in hf or (key in _EXPERTS and experts_known):
            continue
        value = hf[key]
        empty = value is None or value is False or value == 0 or (isinstance(value, (list, dict)) and not value)
        if not empty and not (isinstance(value, (int, float)) and value in neutral):
            return key
    return ""
