"""What each family of decoders computes: `DecoderSpec` of a Hugging Face config. Owns the differences of families.

Whatever a family's class in transformers reads from its config is either turned into the spec here or makes it
`Beyond`, so that no value is passed over. `field_check` names the fields; a test compares them with those classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarm_kernels.models.config import DecoderSpec, LayerSpec, ModelConfig, NormNames, RopeConfig
from swarm_kernels.models.config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_GEMMA_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_OLMO_NORMS = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")


class Beyond(Exception):
    """A field of the config has a value with which the compiled layers do not compute."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


def decoder_spec(read: ConfigReader, config: ModelConfig, other_ropes: tuple[RopeConfig, ...]) -> DecoderSpec:
    """Of a `config` that has everything but its spec. Raises Beyond, CorruptModel."""
    layers, changes = _FAMILIES[config.model_type](read, config)
    act = _ACTIVATIONS.get(config.hidden_act)
    if act is None:
        raise Beyond("hidden_activation" if config.model_type.startswith("gemma") else "hidden_act")
    longest = max((spec.window or 0 for spec in layers), default=0)
    if longest >= config.context_length:
        layers = tuple(LayerSpec(None if _is_wide(spec, config) else spec.window, spec.rope) for spec in layers)
    return DecoderSpec(layers, activation=act, other_ropes=other_ropes, **changes)


def _is_wide(spec: LayerSpec, config: ModelConfig) -> bool:
    return spec.window is not None and spec.window >= config.context_length


_Layers = tuple[LayerSpec, ...]
_Family = Callable[[ConfigReader, ModelConfig], tuple[_Layers, dict[str, Any]]]


def _llama(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    """Of layers that are all alike."""
    _check_all_full(read)
    window = read.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < config.context_length):
        raise Beyond("sliding_window")  # which transformers' class passes over
    return (LayerSpec(),) * config.num_layers, {}


def _mistral(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    _check_all_full(read)
    window = None if read.get("sliding_window") is None else _window(read)
    if window is not None and read.get("layer_types"):
        raise Beyond("layer_types")
    return (LayerSpec(window),) * config.num_layers, {}


def _qwen(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    if not read.flag("use_sliding_window", False) or read.get("sliding_window") is None:
        _check_all_full(read)
        return (LayerSpec(),) * config.num_layers, {}
    first = read.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool):
        raise Beyond("max_window_layers")
    return _by_kind(read, config, lambda layer: layer >= first), {}


def _gemma2(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    layers = _by_kind(read, config, lambda layer: (layer + 1) % 2 == 1)
    changes = _gemma(read, config) | {"score_softcap": _softcap(read, "attn_logit_softcapping")}
    return layers, changes


def _gemma3(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    period = read.get("sliding_window_pattern")
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise Beyond("sliding_window_pattern")
    layers = _by_kind(read, config, lambda layer: (layer + 1) % period != 0, sliding_rope=1)
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


def _granite(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    layers, _ = _llama(read, config)
    return layers, {
        "score_scale": read.number("attention_multiplier", 1.0),
        "embedding_scale": read.number("embedding_multiplier", 1.0),
        "residual_scale": read.number("residual_multiplier", 1.0),
        "logit_divisor": read.number("logits_scaling", 1.0),
    }


def _phi3(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    layers, _ = _mistral(read, config)
    return layers, {"fused": True}


def _olmo2(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    layers, _ = _llama(read, config)
    return layers, {"norms": _OLMO_NORMS, "whole_qk_norm": True}


def _olmo3(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    layers = _by_kind(read, config, lambda layer: (layer + 1) % 4 != 0, sliding_rope=1)
    return layers, {"norms": _OLMO_NORMS, "whole_qk_norm": True}


def _smollm3(read: ConfigReader, config: ModelConfig) -> tuple[_Layers, dict[str, Any]]:
    rotated = read.get("no_rope_layers")
    if rotated is None:
        interval = read.get("no_rope_layer_interval")
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise Beyond("no_rope_layer_interval")
        rotated = [int((layer + 1) % interval != 0) for layer in range(config.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != config.num_layers or any(x not in (0, 1) for x in rotated):
        raise Beyond("no_rope_layers")
    layers: _Layers = (LayerSpec(),) * config.num_layers
    if read.flag("use_sliding_window", False) and read.get("sliding_window") is not None:
        layers = _by_kind(read, config, lambda layer: not rotated[layer])
    else:
        _check_all_full(read)
    return tuple(LayerSpec(spec.window, 0 if rotated[i] else None) for i, spec in enumerate(layers)), {}


_FAMILIES: Mapping[str, _Family] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen, "qwen3": _qwen, "gemma2": _gemma2, "gemma3_text": _gemma3,
    "granite": _granite, "olmo2": _olmo2, "olmo3": _olmo3, "phi3": _phi3, "smollm3": _smollm3,
}  # fmt: skip


def _by_kind(
    read: ConfigReader, config: ModelConfig, is_sliding: Callable[[int], bool], sliding_rope: int = 0
) -> _Layers:
    """Layers by `layer_types`, without which `is_sliding` says which have a window."""
    kinds = read.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if is_sliding(layer) else FULL for layer in range(config.num_layers)]
    known = isinstance(kinds, list) and len(kinds) == config.num_layers
    if not known or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise Beyond("layer_types")
    sliding = LayerSpec(_window(read), sliding_rope) if SLIDING in kinds else LayerSpec()
    return tuple(sliding if kind == SLIDING else LayerSpec() for kind in kinds)


def _window(read: ConfigReader) -> int:
    window = read.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise Beyond("sliding_window")
    return window


def _softcap(read: ConfigReader, key: str) -> float | None:
    return None if read.get(key) is None else read.number(key, 1.0)


def _check_all_full(read: ConfigReader) -> None:
    kinds = read.get("layer_types")
    if kinds and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        raise Beyond("layer_types")
