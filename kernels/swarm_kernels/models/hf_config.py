"""A Hugging Face `config.json` -> ModelConfig. Owns the key aliases and defaults of each model family; reads no files.

Defaults are those of transformers' config classes.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config import FAST_PATH_ARCHITECTURES, ModelConfig, RopeConfig
from swarm_kernels.models.field_check import HARMLESS_FIELDS, LLAMA_FIELDS, beyond_llama_span, unknown_arithmetic

_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "hidden_act": ("activation_function", "hidden_activation"),
}
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "max_window_layers": 28,
        "sliding_window": 4096,
    },
    "qwen3": {
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "max_window_layers": 28,
        "sliding_window": 4096, "head_dim": 128,
    },
}  # fmt: skip
_SCALED_FROM_CONTEXT = ("llama3", "yarn", "longrope")
_MAX_SIZE = 1 << 24
_MAX_LAYERS = 1 << 12
_MAX_WORD = 64  # characters of a name that selects what is computed


def model_config(
    hf: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    has_head: bool = True,
    where: str = "config.json",
) -> ModelConfig:
    """`hf`: the parsed config.json; `generation`: generation_config.json; `has_head`: whether a LM head is stored.

    Raises CorruptModel for impossible values, UnsupportedModel for models that do not run here.
    """
    read = _Reader(hf, where)
    _check_supported(hf, where)
    heads = read.size("num_attention_heads")
    hidden = read.size("hidden_size")
    head_dim = read.size("head_dim", hidden // heads)
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CorruptModel(f"{where}: {heads} attention heads cannot share {kv_heads} key/value heads")
    context = read.size("max_position_embeddings", 2048)
    kind = read.model_type
    attention_bias = read.flag("attention_bias", False) if kind in ("llama", "qwen3") else False
    return ModelConfig(
        model_type=kind,
        num_layers=_num_layers(read),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_widest(read, "intermediate_size", 4 * hidden),
        vocab_size=read.size("vocab_size"),
        context_length=context,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=_rope(read, head_dim, context),
        hidden_act=read.word("hidden_act", "silu"),
        tie_word_embeddings=read.flag("tie_word_embeddings", kind not in _CLASS_DEFAULTS and not has_head),
        qkv_bias=attention_bias or kind == "qwen2",
        o_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias", False) if kind == "llama" else False,
        qk_norm=kind == "qwen3",
        sliding_window=_sliding_window(read),
        eos_token_ids=_eos_ids(where, hf.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        beyond_fast_path=beyond_llama_span(hf) if kind in FAST_PATH_ARCHITECTURES else "",
        hf={key: value for key, value in hf.items() if key != "quantization_config"},  # the source unpacks weights
    )


class _Reader:
    """Typed access by a key or its aliases, then the class default."""

    def __init__(self, hf: Mapping[str, Any], where: str) -> None:
        kind = hf.get("model_type")
        if not isinstance(kind, str) or not 0 < len(kind) <= _MAX_WORD:
            raise CorruptModel(f"{where} does not name a model_type")
        self.model_type = kind
        self.where = where
        self._hf = hf
        self._defaults = _CLASS_DEFAULTS.get(kind, {})

    def get(self, key: str) -> Any:
        for name in (key, *(() if self._defaults else _ALIASES.get(key, ()))):
            if self._hf.get(name) is not None:
                return self._hf[name]
        return None if key in self._hf else self._defaults.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_SIZE:
            return value
        raise CorruptModel(f"{self.where}: {key} is {_brief(value)}, not a positive whole number")

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        return positive(self.where, key, default if value is None else value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool):
            return value
        raise CorruptModel(f"{self.where}: {key} is {_brief(value)}, not true or false")

    def word(self, key: str, default: str) -> str:
        return word(self.where, key, self.get(key) or default)


def positive(where: str, key: str, value: Any) -> float:
    """`value` as a positive finite float, else CorruptModel."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise CorruptModel(f"{where}: {key} is {_brief(value)}, not a positive number")


def word(where: str, key: str, value: Any) -> str:
    """`value` as a short text, else CorruptModel."""
    if isinstance(value, str) and len(value) <= _MAX_WORD:
        return value
    raise CorruptModel(f"{where}: {key} is {_brief(value)}, not a word")


def _widest(read: _Reader, key: str, default: int) -> int:
    """A size, or the largest of one for each layer (Gemma 3n)."""
    value = read.get(key)
    if not isinstance(value, list) or not value:
        return read.size(key, default)
    return max(_Reader({"model_type": read.model_type, key: one}, read.where).size(key) for one in value[:_MAX_LAYERS])


def _brief(value: Any) -> str:
    """`value` in an error; it may be of any size and depth."""
    return reprlib.repr(value)


def _check_supported(hf: Mapping[str, Any], where: str) -> None:
    if isinstance(hf.get("text_config"), Mapping) and "hidden_size" not in hf:
        raise UnsupportedModel(f"{where}: this is a multimodal model; only text decoders are served")
    if hf.get("is_encoder_decoder") is True:
        raise UnsupportedModel(f"{where}: this is an encoder-decoder model; only decoders are served")
    if hf.get("model_type") in FAST_PATH_ARCHITECTURES:
        check_fields(hf, LLAMA_FIELDS | HARMLESS_FIELDS, where)


def check_fields(hf: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises UnsupportedModel for a field that changes the arithmetic elsewhere and is not `known` to this type."""
    if unknown := unknown_arithmetic(hf, known):
        raise UnsupportedModel(
            f"{where}: {unknown} is {_brief(hf[unknown])}, with which models of type {hf.get('model_type')} "
            "do not compute"
        )


def _rope(read: _Reader, head_dim: int, context: int) -> RopeConfig:
    """Both formats: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before)."""
    given = read.get("rope_scaling") or read.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise CorruptModel(f"{read.where}: the rope parameters are not a table")
    scaling = dict(given)
    theta = positive(read.where, "rope_theta", scaling.pop("rope_theta", None) or read.get("rope_theta") or 10000.0)
    rotary = scaling.pop("partial_rotary_factor", None) or read.get("partial_rotary_factor") or 1.0
    if positive(read.where, "partial_rotary_factor", rotary) > 1:
        raise CorruptModel(f"{read.where}: partial_rotary_factor is {_brief(rotary)}, more than all dimensions")
    dim = int(head_dim * rotary)
    legacy = scaling.pop("type", None)
    scaling["rope_type"] = word(read.where, "rope_type", scaling.get("rope_type") or legacy or "default")
    if scaling["rope_type"] in _SCALED_FROM_CONTEXT:
        original = read.get("original_max_position_embeddings")
        scaling.setdefault("original_max_position_embeddings", context if original is None else original)
    plain = scaling["rope_type"] == "default"
    return RopeConfig(theta, None if plain else scaling, None if dim == head_dim else dim)


def _sliding_window(read: _Reader) -> int | None:
    """The window of the layers that have one; None if all layers have full attention."""
    if read.get("sliding_window") is None:
        return None
    if read.model_type in ("qwen2", "qwen3"):
        windowed_from = read.get("max_window_layers")
        if not read.flag("use_sliding_window", False):
            return None
        if not isinstance(windowed_from, int):
            raise CorruptModel(f"{read.where}: max_window_layers is {_brief(windowed_from)}, not a whole number")
        if windowed_from >= read.size("num_hidden_layers"):
            return None
    return read.size("sliding_window") if read.get("sliding_window") != 0 else None  # 0: how Qwen2-MoE says "none"


def _num_layers(read: _Reader) -> int:
    """Some types (Nemotron-H) count their layers by the list of their kinds, or a word with one letter for each."""
    kinds = read.get("layers_block_type") or read.get("hybrid_override_pattern")
    if read.model_type != "nemotron_h" or kinds is None:
        return read.size("num_hidden_layers")
    if isinstance(kinds, (list, str)) and len(kinds) <= _MAX_SIZE:
        return len(kinds)
    raise CorruptModel(f"{read.where}: the kinds of layers are {_brief(kinds)}, neither a list nor a word")


def _eos_ids(where: str, *given: Any) -> tuple[int, ...]:
    """All end-of-sequence ids, from both files: each may have one, several or none."""
    ids: set[int] = set()
    for value in given:
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise CorruptModel(f"{where}: eos_token_id holds {_brief(token)}, which is no token id")
            ids.add(token)
    return tuple(sorted(ids))
