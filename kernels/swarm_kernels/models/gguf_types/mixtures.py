"""GGUF metadata -> Hugging Face's configs of mixtures of experts. Pure. Raises CorruptModel, UnsupportedModel."""

from __future__ import annotations

from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.gguf_types.configs import (
    biases,
    common,
    granite_fields,
    lfm2,
    no_window,
    rotate_partly,
    window_pattern,
)
from swarm_kernels.models.gguf_types.metadata import MAX_EXPERTS, MAX_LAYERS, Metadata

_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's `expert_gating_func`."""

_UNSTATED_GROUPS = {("deepseek_v2", 160): (8, 3), ("deepseek_v3", 256): (8, 4)}
"""Of DeepSeek's released models, whose files say nothing of the groups of experts until September 2025."""

_PHI_MOE_CONTEXT = (1 << 17, 4096)
_PHI_MOE_SCALE = 1.243163121016122
"""The scale of rotary embeddings of Phi-3.5-MoE, whose files hold another one that its original does not use."""
_LLAMA4_CHUNK = 8192
_LLAMA4_WITHOUT_NORM = 128  # experts of the model that does not norm its queries


def _counts(meta: Metadata) -> tuple[int, int]:
    """Experts, and how many of them a token takes."""
    experts, used = meta.need("expert_count", MAX_EXPERTS), meta.need("expert_used_count", MAX_EXPERTS)
    if used > experts:
        raise CorruptModel(f"{meta.where}: a token cannot take {used} of {experts} experts")
    return experts, used


def _unscaled(meta: Metadata) -> None:
    """Raises UnsupportedModel where the experts' weights are scaled, which this family's config cannot say."""
    if (meta.number("expert_weights_scale", 1.0) or 1.0) != 1.0:
        raise UnsupportedModel(f"{meta.where} scales its experts ('{meta.arch}.expert_weights_scale')")


def _width(meta: Metadata, used: int) -> int:
    """Of an expert."""
    return meta.uniform("expert_feed_forward_length", meta.uniform("feed_forward_length", 0) // used)


def qwen2_moe(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    config = common(meta, "qwen2_moe")
    no_window(meta, config["max_position_embeddings"])
    _unscaled(meta)
    return config | {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": _width(meta, used),
        "shared_expert_intermediate_size": meta.integer(
            "expert_shared_feed_forward_length", config["intermediate_size"]
        ),
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
    }


def qwen3_moe(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    config = common(meta, "qwen3_moe", **biases(meta))
    no_window(meta, config["max_position_embeddings"])
    _unscaled(meta)
    return config | {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": _width(meta, used),
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
    }


def lfm2_moe(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    _unscaled(meta)
    _routed_by(meta, _SIGMOID)
    config = lfm2(meta)
    del config["block_auto_adjust_ff_dim"]
    return config | {
        "model_type": "lfm2_moe",
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "num_dense_layers": meta.integer("leading_dense_block_count", 0),
        "use_expert_bias": any(meta.in_layer(f"exp_probs_b{suffix}") for suffix in (".bias", ".weight", "")),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def olmoe(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    _unscaled(meta)
    clip = meta.number("attention.clamp_kqv")
    return common(meta, "olmoe", num_experts=experts, num_experts_per_tok=used, norm_topk_prob=False, clip_qkv=clip)


def gpt_oss(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    config = common(meta, "gpt_oss")
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    layers = config["num_hidden_layers"]
    windowed = meta.per_layer("attention.sliding_window_pattern", layers) or [1 - layer % 2 for layer in range(layers)]
    return config | {
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "intermediate_size": _width(meta, used),
        "sliding_window": meta.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
    }


def granite_moe(meta: Metadata) -> dict[str, Any]:
    """Granite's mixtures, with a shared expert or without."""
    experts, used = _counts(meta)
    _unscaled(meta)
    shared = meta.integer("expert_shared_feed_forward_length", 0) or 0
    kind = "granitemoeshared" if shared else "granitemoe"
    config = common(
        meta, kind, num_local_experts=experts, num_experts_per_tok=used, **granite_fields(meta),
        intermediate_size=meta.uniform("expert_feed_forward_length", meta.uniform("feed_forward_length", 0)),
    )  # fmt: skip
    return config | ({"shared_intermediate_size": shared} if shared else {})


def llama4(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    _unscaled(meta)
    config = common(meta, "llama4_text")
    window = meta.integer("attention.sliding_window")
    if window == 0 or meta.has("attention.sliding_window_pattern"):
        raise UnsupportedModel(f"{meta.where} has layers other than Llama 4's; use its safetensors")
    return config | {
        "intermediate_size": meta.need("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"] or 1,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "interleave_moe_layer_step": meta.integer("interleave_moe_layer_step", 1),
        "use_qk_norm": experts != _LLAMA4_WITHOUT_NORM,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": _LLAMA4_CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _LLAMA4_CHUNK,
        "attn_scale": 0.1,
    }


def minimax_m2(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    _unscaled(meta)
    _routed_by(meta, _SIGMOID)
    config = common(
        meta, "minimax_m2", num_local_experts=experts, num_experts_per_tok=used, intermediate_size=_width(meta, used)
    )
    rotate_partly(config, meta)
    return config


def phi_moe(meta: Metadata) -> dict[str, Any]:
    """Phi-3.5-MoE. llama.cpp knows nothing of the jitter by which its original chooses experts."""
    experts, used = _counts(meta)
    _unscaled(meta)
    config = common(meta, "phimoe", **biases(meta))
    del config["head_dim"]
    rope = config["rope_parameters"]
    if rope["rope_type"] == "longrope":
        if (config["max_position_embeddings"], rope["original_max_position_embeddings"]) != _PHI_MOE_CONTEXT:
            raise UnsupportedModel(f"{meta.where} is no Phi-3.5-MoE; how it scales its rotary embedding is not stored")
        rope |= {"short_mscale": _PHI_MOE_SCALE, "long_mscale": _PHI_MOE_SCALE}
    elif rope["rope_type"] != "default":
        raise UnsupportedModel(f"{meta.where} scales its rotary embedding otherwise than Phi-3.5-MoE")
    return config | {
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "sliding_window": meta.integer("attention.sliding_window", 0) or None,
        "lm_head_bias": "output.bias" in meta.tensors,
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.0,
    }


def mimo_v2(meta: Metadata) -> dict[str, Any]:
    """MiMo V2, whose layers with a window have twice as many key heads as the others. A file holds the window of its
    original's config, which counts the tokens before a row; transformers' counts the row too."""
    experts, used = _counts(meta)
    _unscaled(meta)
    _routed_by(meta, _SIGMOID)
    layers = meta.need("block_count", MAX_LAYERS) - (meta.integer("nextn_predict_layers", 0) or 0)
    kinds = window_pattern(meta, layers, 1)
    heads = meta.per_layer("attention.head_count_kv", layers) or [meta.need("attention.head_count_kv")] * layers
    full = [each for each, kind in zip(heads, kinds, strict=True) if kind == "full_attention"]
    key_heads = full[0] if full else heads[0] // 2
    if any(each != key_heads * (1 + (kind == "sliding_attention")) for each, kind in zip(heads, kinds, strict=True)):
        raise UnsupportedModel(f"{meta.where}: its layers have other key heads than those of MiMo V2")
    config = common(meta, "mimo_v2_flash", key_heads, **biases(meta))
    rotate_partly(config, meta)
    groups, used_groups = meta.integer("expert_group_count", 1) or 1, meta.integer("expert_group_used_count", 1) or 1
    _check_groups(meta, experts, groups, used_groups)
    rope = config["rope_parameters"]
    return config | {
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": _width(meta, used),
        "n_group": groups,
        "topk_group": used_groups,
        "norm_topk_prob": True,
        "v_head_dim": meta.need("attention.value_length"),
        "attention_value_scale": meta.number("attention.value_scale") or 1.0,
        "sliding_window": meta.need("attention.sliding_window") + 1,
        "layer_types": kinds,
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in meta.tensors else "dense" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": rope | {"rope_theta": meta.number("rope.freq_base_swa", rope["rope_theta"])},
        },
    }


def glm4_moe(meta: Metadata) -> dict[str, Any]:
    experts, used = _counts(meta)
    _routed_by(meta, _SIGMOID)
    config = common(meta, "glm4_moe", **biases(meta))
    rotate_partly(config, meta)
    groups, used_groups = meta.integer("expert_group_count", 1) or 1, meta.integer("expert_group_used_count", 1) or 1
    _check_groups(meta, experts, groups, used_groups)
    return config | {
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": _width(meta, used),
        "n_shared_experts": meta.integer("expert_shared_count", 1),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": used_groups,
        "use_qk_norm": meta.in_layer("attn_q_norm.weight"),
    }


def deepseek2(meta: Metadata) -> dict[str, Any]:
    """DeepSeek V2 (softmax) and V3 (sigmoid), Kimi K2, GLM 4.7 Flash."""
    mixture = bool(meta.integer("expert_count", 0))
    routed = meta.integer("expert_gating_func", 0)
    corrected = any(meta.in_layer(f"exp_probs_b{suffix}") for suffix in (".bias", ".weight", ""))
    if routed not in (0, _SOFTMAX, _SIGMOID):
        raise UnsupportedModel(f"{meta.where} routes to its experts in a way that is not known ({routed})")
    sigmoid = routed == _SIGMOID or corrected or not mixture
    config = common(meta, "deepseek_v3" if sigmoid else "deepseek_v2")
    config |= _latent_heads(meta)
    _restore_mscale(meta, config["rope_parameters"])
    dense = meta.integer("leading_dense_block_count", 0)
    if not mixture:
        return config | {"first_k_dense_replace": config["num_hidden_layers"]}
    experts, used = _counts(meta)
    config |= {
        "first_k_dense_replace": dense,
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": _width(meta, used),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
    }
    return config | _groups_of(meta, config, experts)


def _latent_heads(meta: Metadata) -> dict[str, Any]:
    """Head sizes: of the keys and values as they are multiplied, which newer files keep under other keys."""
    rotated = meta.need("rope.dimension_count")
    newer = meta.has("attention.key_length_mla")
    keys = meta.need("attention.key_length_mla" if newer else "attention.key_length")
    values = meta.need("attention.value_length_mla" if newer else "attention.value_length")
    if keys <= rotated:
        raise CorruptModel(f"{meta.where}: {rotated} of the {keys} dimensions of a head cannot be rotated")
    heads = meta.need("attention.head_count")
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "q_lora_rank": meta.integer("attention.q_lora_rank"),
        "kv_lora_rank": meta.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "rope_interleave": True,
    }


def _restore_mscale(meta: Metadata, rope: dict[str, Any]) -> None:
    """The scale of YaRN's attention: llama.cpp takes both of DeepSeek's for equal, and stores a tenth of it."""
    stored = meta.number("rope.scaling.yarn_log_multiplier")
    if stored and rope["rope_type"] == "yarn":
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * stored, 6)


def _groups_of(meta: Metadata, config: dict[str, Any], experts: int) -> dict[str, Any]:
    unstated = _UNSTATED_GROUPS.get((config["model_type"], experts), (1, 1))
    groups = meta.integer("expert_group_count", unstated[0]) or 1
    used = meta.integer("expert_group_used_count", unstated[1]) or 1
    _check_groups(meta, experts, groups, used)
    if config["model_type"] == "deepseek_v3":
        return {"n_group": groups, "topk_group": used}
    if config["norm_topk_prob"]:
        raise UnsupportedModel(f"{meta.where} norms the weights of its experts, which DeepSeek V2 does not")
    del config["norm_topk_prob"], config["rope_interleave"]
    if groups == 1:
        return {"topk_method": "greedy"}
    return {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": used}


def _check_groups(meta: Metadata, experts: int, groups: int, used: int) -> None:
    if not 1 <= used <= groups or experts % groups:
        raise CorruptModel(f"{meta.where}: {experts} experts cannot be in {groups} groups, of which {used} are used")


def _routed_by(meta: Metadata, known: int) -> None:
    """Raises UnsupportedModel for another way to route than this family's."""
    if meta.integer("expert_gating_func", known) not in (0, known):
        raise UnsupportedModel(f"{meta.where} routes to its experts otherwise than models of its architecture")
