"""GGUF metadata -> the fields of Hugging Face's config that all decoders share, and those of dense families.

Where llama.cpp fixes a number in its code, so does the function of that family. Pure. Raises CorruptModel,
UnsupportedModel.
"""

from __future__ import annotations

import math
from typing import Any

from swarm.errors import UnsupportedModel
from swarm_kernels.models.gguf_types.metadata import MAX_LAYERS, Metadata
from swarm_kernels.models.gguf_types.rope import partial_rotary, rope_parameters

_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, which scale their queries by the width of a head that hidden size and heads suggest."""


def common(meta: Metadata, kind: str, kv_heads: int | None = None, **changes: Any) -> dict[str, Any]:
    """Everything but windows and experts. Layers that predict further tokens are not counted. `kv_heads`: where the
    layers differ in them."""
    layers = meta.need("block_count", MAX_LAYERS) - (meta.integer("nextn_predict_layers", 0) or 0)
    heads, hidden = meta.need("attention.head_count"), meta.need("embedding_length")
    context = meta.need("context_length")
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or meta.uniform("attention.head_count_kv", heads),
        "head_dim": meta.integer("attention.key_length", hidden // heads),
        "intermediate_size": meta.uniform("feed_forward_length", 0),
        "vocab_size": meta.rows("token_embd.weight"),
        "max_position_embeddings": context,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        "rope_parameters": rope_parameters(meta, context),
        **meta.tokens(),
        **changes,
    }


def biases(meta: Metadata) -> dict[str, Any]:
    return {"attention_bias": meta.in_layer("attn_q.bias")}


def no_window(meta: Metadata, context: int) -> None:
    """Raises UnsupportedModel for a window that would be felt."""
    window = meta.integer("attention.sliding_window", 0)
    if window and window < context:
        raise UnsupportedModel(
            f"{meta.where} has sliding-window attention, which is not read from GGUF; use its safetensors"
        )


def rotate_partly(config: dict[str, Any], meta: Metadata) -> None:
    fraction = partial_rotary(meta, config["head_dim"] or 1)
    config["rope_parameters"]["partial_rotary_factor"] = fraction


def window_pattern(meta: Metadata, layers: int, period: int) -> list[str]:
    """The kinds of the layers: those whose number is no multiple of the period have a window."""
    windowed = meta.per_layer("attention.sliding_window_pattern", layers)
    if not windowed:
        period = meta.integer("attention.sliding_window_pattern", period) or 0
        windowed = [int(period == 0 or (layer + 1) % period != 0) for layer in range(layers)] if period != 1 else []
        windowed = windowed or [0] * layers
    return ["sliding_attention" if one else "full_attention" for one in windowed]


def llama(meta: Metadata) -> dict[str, Any]:
    mixture = bool(meta.integer("expert_count", 0))
    config = common(meta, "mixtral" if mixture else "llama", architectures=["LlamaForCausalLM"])
    no_window(meta, config["max_position_embeddings"])
    if mixture:
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": meta.need("expert_count"),
            "num_experts_per_tok": meta.need("expert_used_count"),
            "sliding_window": None,
        }
    return config | biases(meta) | {"mlp_bias": meta.in_layer("ffn_up.bias")}


def qwen2(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "qwen2", architectures=["Qwen2ForCausalLM"])
    no_window(meta, config["max_position_embeddings"])
    return config


def qwen3(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "qwen3", architectures=["Qwen3ForCausalLM"], **biases(meta))
    no_window(meta, config["max_position_embeddings"])
    return config


def gemma(meta: Metadata) -> dict[str, Any]:
    return common(meta, "gemma", hidden_act="gelu_pytorch_tanh")


def _scaled_queries(meta: Metadata, config: dict[str, Any]) -> int:
    large = config["num_hidden_layers"] == _LARGE_GEMMA[meta.arch]
    return int(config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"])


def gemma2(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "gemma2")
    del config["hidden_act"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scaled_queries(meta, config),
        "sliding_window": meta.integer("attention.sliding_window", 4096),
        "layer_types": window_pattern(meta, config["num_hidden_layers"], 2),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }


def gemma3(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "gemma3_text")
    del config["hidden_act"]
    window = meta.integer("attention.sliding_window", 0)
    kinds = window_pattern(meta, config["num_hidden_layers"], 6 if window else 1)
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scaled_queries(meta, config),
        "sliding_window": window or 4096,
        "layer_types": kinds,
        "final_logit_softcapping": meta.number("final_logit_softcapping") or None,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 10000.0),
            },
        },
    }  # fmt: skip


def phi3(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "phi3", sliding_window=meta.integer("attention.sliding_window", 0) or None)
    rotate_partly(config, meta)
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    return config | {"original_max_position_embeddings": original}


def glm4(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "glm4", **biases(meta))
    rotate_partly(config, meta)
    return config


def olmo2(meta: Metadata) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which llama.cpp tells by its window."""
    window = meta.integer("attention.sliding_window", 0)
    if not window:
        return common(meta, "olmo2", **biases(meta))
    config = common(meta, "olmo3", **biases(meta))
    theta = config["rope_parameters"]["rope_theta"]
    return config | {
        "sliding_window": window,
        "layer_types": window_pattern(meta, config["num_hidden_layers"], 4),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", theta)},
        },
    }


def smollm3(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "smollm3", no_rope_layer_interval=4, use_sliding_window=False, **biases(meta))
    no_window(meta, config["max_position_embeddings"])
    return config | {"mlp_bias": meta.in_layer("ffn_up.bias")}


def seed_oss(meta: Metadata) -> dict[str, Any]:
    config = common(meta, "seed_oss", **biases(meta))
    return config | {"attention_out_bias": meta.in_layer("attn_output.bias"), "mlp_bias": meta.in_layer("ffn_up.bias")}


def lfm2(meta: Metadata) -> dict[str, Any]:
    """LFM2, whose layers without key heads are short convolutions."""
    layers = meta.need("block_count", MAX_LAYERS)
    key_heads = meta.per_layer("attention.head_count_kv", layers) or [meta.need("attention.head_count_kv")] * layers
    if len(set(key_heads) - {0}) != 1:
        raise UnsupportedModel(f"{meta.where}: its attention layers differ in their key heads; use its safetensors")
    config = common(meta, "lfm2", max(key_heads))
    del config["hidden_act"], config["head_dim"]
    return config | {
        "norm_eps": config.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if heads else "conv" for heads in key_heads],
        "conv_L_cache": meta.need("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def granite_fields(meta: Metadata) -> dict[str, Any]:
    """Granite's scales, which llama.cpp takes for 1 where they are 0 or absent."""
    head_dim = meta.need("embedding_length") // meta.need("attention.head_count")
    return {
        "attention_multiplier": meta.number("attention.scale") or 1 / math.sqrt(head_dim),
        "embedding_multiplier": meta.number("embedding_scale") or 1.0,
        "residual_multiplier": meta.number("residual_scale") or 1.0,
        "logits_scaling": meta.number("logit_scale") or 1.0,
        **biases(meta),
    }


def granite(meta: Metadata) -> dict[str, Any]:
    return common(meta, "granite", mlp_bias=meta.in_layer("ffn_up.bias"), **granite_fields(meta))
