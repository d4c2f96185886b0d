"""What each family of decoders computes: `DecoderSpec` of a Hugging Face config. Owns the differences of families.

Whatever a family's class in transformers reads from its config is either turned into the spec here or makes it
`Beyond`, so that no value is passed over. `field_check` names the fields; a test compares them with those classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swarm_kernels.models.config import DecoderSpec, LayerSpec, ModelConfig, NormNames, RopeConfig
from swarm_kernels.models.config_reader import ConfigReader
from swarm_kernels.models.layer_kinds import Beyond, Layers, alike, all_windowed, by_kind, check_all_full
from swarm_kernels.models.mixture_families import MIXTURE_FAMILIES, Family, granite_scales

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_GEMMA_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_OLMO_NORMS = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def decoder_spec(read: ConfigReader, config: ModelConfig, other_ropes: tuple[RopeConfig, ...]) -> DecoderSpec:
    """Of a `config` that has everything but its spec. Raises Beyond, CorruptModel."""
    family = _FAMILIES.get(config.model_type) or MIXTURE_FAMILIES[config.model_type]
    layers, changes = family(read, config)
    act = _ACTIVATIONS.get(config.hidden_act)
    if act is None:
        raise Beyond("hidden_activation" if config.model_type.startswith("gemma") else "hidden_act")
    mixture = changes.get("mixture")
    if mixture is not None and act == "gelu":  # by the error function, which no expert computes
        raise Beyond("hidden_act")
    longest = max((spec.window or 0 for spec in layers), default=0)
    if longest >= config.context_length:
        layers = tuple(replace(spec, window=None) if _is_wide(spec, config) else spec for spec in layers)
    return DecoderSpec(layers, activation=act, other_ropes=other_ropes, **changes)


def _is_wide(spec: LayerSpec, config: ModelConfig) -> bool:
    return spec.window is not None and spec.window >= config.context_length


def _llama(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    return alike(read, config), {}


def _mistral(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    return all_windowed(read, config), {}


def _qwen(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    if not read.flag("use_sliding_window", False) or read.get("sliding_window") is None:
        check_all_full(read)
        return (LayerSpec(),) * config.num_layers, {}
    first = read.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool):
        raise Beyond("max_window_layers")
    return by_kind(read, config, lambda layer: layer >= first), {}


def _gemma2(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    layers = by_kind(read, config, lambda layer: (layer + 1) % 2 == 1)
    changes = _gemma(read, config) | {"score_softcap": _softcap(read, "attn_logit_softcapping")}
    return layers, changes


def _gemma3(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    period = read.get("sliding_window_pattern")
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise Beyond("sliding_window_pattern")
    layers = by_kind(read, config, lambda layer: (layer + 1) % period != 0, sliding_rope=1)
    if read.get("attn_logit_softcapping") is not None:  # which transformers' attention passes over
        raise Beyond("attn_logit_softcapping")
    return layers, _gemma(read, config)


def _gemma(read: ConfigReader, config: ModelConfig) -> dict[str, Any]:
    if read.get("use_bidirectional_attention"):
        raise Beyond("use_bidirectional_attention")
    return {
        "norms": _GEMMA_NORMS,
        "norm_offset": 1.0,
        "score_scale": read.number("query_pre_attn_scalar", config.head_dim) ** -0.5,
        "embedding_scale": config.hidden_size**0.5,
        "rounds_embedding_scale": True,
        "logit_softcap": _softcap(read, "final_logit_softcapping"),
    }


def _granite(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    return alike(read, config), granite_scales(read)


def _phi3(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    layers, _ = _mistral(read, config)
    return layers, {"fused": True}


def _olmo2(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    layers, _ = _llama(read, config)
    return layers, {"norms": _OLMO_NORMS, "whole_qk_norm": True}


def _olmo3(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    layers = by_kind(read, config, lambda layer: (layer + 1) % 4 != 0, sliding_rope=1)
    return layers, {"norms": _OLMO_NORMS, "whole_qk_norm": True}


def _smollm3(read: ConfigReader, config: ModelConfig) -> tuple[Layers, dict[str, Any]]:
    rotated = read.get("no_rope_layers")
    if rotated is None:
        interval = read.get("no_rope_layer_interval")
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise Beyond("no_rope_layer_interval")
        rotated = [int((layer + 1) % interval != 0) for layer in range(config.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != config.num_layers or any(x not in (0, 1) for x in rotated):
        raise Beyond("no_rope_layers")
    layers: Layers = (LayerSpec(),) * config.num_layers
    if read.flag("use_sliding_window", False) and read.get("sliding_window") is not None:
        layers = by_kind(read, config, lambda layer: not rotated[layer])
    else:
        check_all_full(read)
    return tuple(LayerSpec(spec.window, 0 if rotated[i] else None) for i, spec in enumerate(layers)), {}


_FAMILIES: Mapping[str, Family] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen, "qwen3": _qwen, "gemma2": _gemma2, "gemma3_text": _gemma3,
    "granite": _granite, "olmo2": _olmo2, "olmo3": _olmo3, "phi3": _phi3, "smollm3": _smollm3,
}  # fmt: skip


def _softcap(read: ConfigReader, key: str) -> float | None:
    return None if read.get(key) is None else read.number(key, 1.0)
