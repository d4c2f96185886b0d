"""What each family of mixtures of experts computes, beside `families`: `MixtureSpec`s, and which layers have one.

The arithmetic is that of the family's class in transformers; `field_check` names the fields of its config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from swarm.errors import CorruptModel
from swarm_kernels.models.config import LayerSpec, MixtureSpec, ModelConfig
from swarm_kernels.models.config_reader import ConfigReader, brief
from swarm_kernels.models.layer_kinds import Beyond, Layers, alike, all_windowed, by_kind, check_all_full

_MAX_EXPERTS = 1 << 12
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts: some classes know two."""

Family = Callable[[ConfigReader, ModelConfig], tuple[Layers, dict[str, Any]]]


def _qwen3_moe(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    check_all_full(read)
    windowed = read.flag("use_sliding_window", False)
    layers = all_windowed(read, config) if windowed else (LayerSpec(),) * config.num_layers
    mixture = MixtureSpec(
        *_counts(read, 128),
        read.size("moe_intermediate_size"),
        normalized=read.flag("norm_topk_prob", False),
    )
    return _sparse_steps(read, layers), {"mixture": mixture}


def _qwen2_moe(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    windowed = read.flag("use_sliding_window", False)
    if windowed:
        first_full = read.size("max_window_layers")
        layers = by_kind(read, config, lambda layer: layer % 2 == 0 and layer < first_full)
    else:
        check_all_full(read)
        layers = (LayerSpec(),) * config.num_layers
    mixture = MixtureSpec(
        *_counts(read, 60),
        read.size("moe_intermediate_size"),
        normalized=read.flag("norm_topk_prob", False),
        shared_width=read.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _sparse_steps(read, layers), {"mixture": mixture}


def _mixtral(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    mixture = MixtureSpec(*_counts(read, 8), config.intermediate_size, normalized=True)
    return _all(all_windowed(read, config)), {"mixture": mixture}


def _olmoe(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    if read.get("clip_qkv") is not None:
        raise Beyond("clip_qkv")
    if config.head_dim * config.num_heads != config.hidden_size:  # its norms are as wide as the hidden states
        raise Beyond("head_dim")
    mixture = MixtureSpec(*_counts(read, 64), config.intermediate_size, normalized=read.flag("norm_topk_prob", False))
    return _all(alike(read, config)), {"mixture": mixture, "whole_qk_norm": True}


def _gpt_oss(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    if not (read.get("rope_parameters") or read.get("rope_scaling")):
        raise Beyond("rope_parameters")  # the class would take YaRN
    mixture = MixtureSpec(
        *_counts(read, 128),
        config.intermediate_size,
        scores="softmax_of_chosen",
        router_bias=True,
        expert_bias=True,
        interleaved=True,
        gating=(read.number("swiglu_alpha", 1.702), read.number("swiglu_limit", 7.0), 1.0),
    )
    layers = by_kind(read, config, lambda layer: (layer + 1) % 2 == 1)
    return _all(layers), {"mixture": mixture, "sinks": True}


def _granitemoe(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    mixture = MixtureSpec(*_counts(read, 8), config.intermediate_size, scores="softmax_of_chosen")
    return _all(alike(read, config)), {"mixture": mixture, **granite_scales(read)}


def _minimax_m2(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    if read.get("use_qk_norm") is False:  # its class norms them all the same
        raise Beyond("use_qk_norm")
    mixture = MixtureSpec(
        *_counts(read, 256),
        config.intermediate_size,
        scores="sigmoid",
        normalized=True,
        correction=True,
    )
    return _all(alike(read, config)), {"mixture": mixture, "whole_qk_norm": True}


def _glm4_moe(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    width, shared = read.size("moe_intermediate_size"), read.size("n_shared_experts", most=_MAX_EXPERTS)
    mixture = MixtureSpec(
        *_counts(read, 128),
        width,
        scores="sigmoid",
        normalized=read.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=read.number("routed_scaling_factor", 1.0),
        groups=read.size("n_group", most=_MAX_EXPERTS),
        used_groups=read.size("topk_group", most=_MAX_EXPERTS),
        correction=True,
        shared_width=shared * width,
    )
    in_group, rest = divmod(mixture.experts, mixture.groups)
    if rest or mixture.used_groups > mixture.groups or mixture.chosen > mixture.used_groups * in_group:
        raise CorruptModel(
            f"{read.where}: {mixture.chosen} of {mixture.experts} experts cannot be chosen from {mixture.used_groups} "
            f"of {mixture.groups} groups"
        )
    if mixture.groups > 1 and in_group < 2:  # which transformers refuses when it runs
        raise Beyond("n_group")
    dense = read.get("first_k_dense_replace")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise Beyond("first_k_dense_replace")
    layers = alike(read, config)
    return tuple(replace(spec, mixture=i >= dense) for i, spec in enumerate(layers)), {"mixture": mixture}


def granite_scales(read: ConfigReader) -> dict[str, Any]:
    return {
        "score_scale": read.number("attention_multiplier", 1.0),
        "embedding_scale": read.number("embedding_multiplier", 1.0),
        "residual_scale": read.number("residual_multiplier", 1.0),
        "logit_divisor": read.number("logits_scaling", 1.0),
    }


MIXTURE_FAMILIES: Mapping[str, Family] = {
    "glm4_moe": _glm4_moe, "gpt_oss": _gpt_oss, "granitemoe": _granitemoe, "minimax_m2": _minimax_m2,
    "mixtral": _mixtral, "olmoe": _olmoe, "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe,
}  # fmt: skip


def _counts(read: ConfigReader, default: int) -> tuple[int, int]:
    """Experts, and how many of them a row takes."""
    given = [(name, read.get(name)) for name in _COUNTS if read.get(name) is not None]
    if any(value != given[0][1] for _, value in given):
        raise Beyond(given[1][0])
    experts = read.size(given[0][0], most=_MAX_EXPERTS) if given else default
    chosen = read.size("num_experts_per_tok", most=_MAX_EXPERTS)
    if chosen > experts:
        raise CorruptModel(f"{read.where}: a row cannot take {chosen} of {experts} experts")
    return experts, chosen


def _all(layers: Layers) -> Layers:
    return tuple(replace(spec, mixture=True) for spec in layers)


def _sparse_steps(read: ConfigReader, layers: Layers) -> Layers:
    """Every `decoder_sparse_step`-th layer has a mixture, but for those of `mlp_only_layers`."""
    step, plain = read.size("decoder_sparse_step"), read.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in plain):
        raise CorruptModel(f"{read.where}: mlp_only_layers is {brief(plain)}, not a list of layers")
    return tuple(replace(spec, mixture=(i + 1) % step == 0 and i not in plain) for i, spec in enumerate(layers))
