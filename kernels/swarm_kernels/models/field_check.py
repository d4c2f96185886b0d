"""Which fields of a Hugging Face config `LlamaSpan` computes with, and which no decoder of that type knows.

Owns the two answers: the field because of which a Llama-like model goes to transformers' layers, and the refusal of
fields that change the arithmetic elsewhere but that transformers would pass over in silence. Reads no files.
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
"""What `hf_config` reads for the fast path."""

HARMLESS_FIELDS = frozenset({
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp",
    "attention_dropout", "model_type", "architectures", "dtype", "torch_dtype", "transformers_version",
})  # fmt: skip
"""Fields of the Llama-like classes that change no answer."""

_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "attention_factor",
    }),
}  # fmt: skip
"""Rope types that `rope.RopeTable` computes, and their parameters."""

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


def beyond_llama_span(hf: Mapping[str, Any]) -> str:
    """The field of a Llama-like config that `LlamaSpan` does not compute with as transformers does; "" for none."""
    for key in ("rope_parameters", "rope_scaling"):
        given = hf.get(key)
        if not isinstance(given, Mapping):
            continue
        kind = given.get("rope_type") or given.get("type") or "default"
        if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
            return f"{key}.rope_type"
        unread = set(map(str, given)) - _ROPE_FIELDS[kind] - {"rope_type", "type", "rope_theta", *_PASSED_OVER}
        if unread:
            return f"{key}.{min(unread)}"
    rope = hf.get("rope_parameters") or {}
    if hf.get("rope_scaling") and hf.get("rope_parameters") and hf["rope_scaling"] != rope:
        return "rope_scaling"
    scaling = hf.get("rope_scaling") or rope
    outer = hf.get("original_max_position_embeddings")
    if outer is not None and scaling.get("original_max_position_embeddings", outer) != outer:
        return "original_max_position_embeddings"
    if not _is_whole(hf.get("partial_rotary_factor")):
        return "partial_rotary_factor"
    kinds = hf.get("layer_types")
    if kinds and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        return "layer_types"
    return ""


_PASSED_OVER = frozenset({"finetuned", "original_max_position_embeddings", "factor"})
"""Parameters that transformers passes over where the rope type does not read them."""


def _is_whole(factor: Any) -> bool:
    return factor is None or factor == 1


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
