"""A Hugging Face `config.json` -> ModelConfig, whatever its model type. Reads no files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config import FAST_PATH_ARCHITECTURES, ModelConfig
from swarm_kernels.models.config_reader import CLASS_DEFAULTS, MAX_LAYERS, ConfigReader, brief
from swarm_kernels.models.families import decoder_spec
from swarm_kernels.models.field_check import known_fields, unknown_arithmetic
from swarm_kernels.models.layer_kinds import Beyond
from swarm_kernels.models.rope_config import rope_configs, rope_fault
from swarm_kernels.models.row_layout import row_layout

_ATTENTION_BIAS = (
    "llama", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "smollm3", "glm4_moe", "gpt_oss",
    "granitemoe", "olmoe", "qwen3_moe",
)  # fmt: skip
_MLP_BIAS = ("llama", "granite", "smollm3")
_QK_NORM = ("qwen3", "gemma3_text", "olmo2", "olmo3", "minimax_m2", "olmoe", "qwen3_moe")
_HIDDEN_ACTIVATION = ("gemma2", "gemma3_text")
"""Model types by what their classes read or do."""

_SAME_AS = {"mimo": "qwen2"}
"""Types without a class in transformers whose layers are another type's (MiMo-7B, beside its MTP layers)."""


_WITH_TEXT_PART = frozenset({"gemma3n", "gemma4"})
"""Multimodal types whose text decoder is served, for texts."""

_SHARED_FIELDS = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text decoder of a multimodal model whose text part is served; of other models, theirs."""
    text = hf.get("text_config")
    if hf.get("model_type") not in _WITH_TEXT_PART or not isinstance(text, Mapping):
        return hf
    outer = {key: hf[key] for key in _SHARED_FIELDS if hf.get(key) is not None}
    return {"model_type": f"{hf['model_type']}_text", **outer, **text}


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
    if isinstance(kind := hf.get("model_type"), str) and kind in _SAME_AS:
        hf = {**hf, "model_type": _SAME_AS[kind]}
    read = ConfigReader(hf, where)
    _check_supported(hf, where)
    heads = read.size("num_attention_heads")
    hidden = read.size("hidden_size")
    head_dim = read.size("head_dim", hidden // heads)
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CorruptModel(f"{where}: {heads} attention heads cannot share {kv_heads} key/value heads")
    context = read.size("max_position_embeddings", 2048)
    kind = read.model_type
    attention_bias = read.flag("attention_bias", False) if kind in _ATTENTION_BIAS else False
    rope, other_ropes = rope_configs(read, head_dim, context)
    num_layers = _num_layers(read)
    config = ModelConfig(
        model_type=kind,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=read.widest("intermediate_size", 4 * hidden),
        vocab_size=read.size("vocab_size"),
        context_length=context,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        hidden_act=read.word("hidden_activation" if kind in _HIDDEN_ACTIVATION else "hidden_act", "silu"),
        tie_word_embeddings=read.flag("tie_word_embeddings", kind not in CLASS_DEFAULTS and not has_head),
        qkv_bias=attention_bias or kind == "qwen2" or (kind == "qwen2_moe" and read.flag("qkv_bias", True)),
        o_bias=attention_bias and kind != "glm4_moe",
        mlp_bias=read.flag("mlp_bias", False) if kind in _MLP_BIAS else False,
        qk_norm=kind in _QK_NORM or (kind == "glm4_moe" and read.flag("use_qk_norm", False)),
        sliding_window=_sliding_window(read),
        eos_token_ids=_eos_ids(where, hf.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        layout=row_layout(read, num_layers, hidden),
        hf={key: value for key, value in hf.items() if key != "quantization_config"},  # the source unpacks weights
    )
    if kind not in FAST_PATH_ARCHITECTURES:
        return config
    if fault := rope_fault(read, hf):
        return replace(config, beyond_fast_path=fault)
    try:
        return replace(config, decoder=decoder_spec(read, config, other_ropes))
    except Beyond as beyond:
        return replace(config, beyond_fast_path=beyond.field)


def _check_supported(hf: Mapping[str, Any], where: str) -> None:
    if isinstance(hf.get("text_config"), Mapping) and "hidden_size" not in hf:
        raise UnsupportedModel(f"{where}: this is a multimodal model; only text decoders are served")
    if hf.get("is_encoder_decoder") is True:
        raise UnsupportedModel(f"{where}: this is an encoder-decoder model; only decoders are served")
    if hf.get("model_type") in FAST_PATH_ARCHITECTURES:
        check_fields(hf, known_fields(str(hf["model_type"])), where)


def check_fields(hf: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises UnsupportedModel for a field that changes the arithmetic elsewhere and is not `known` to this type."""
    if unknown := unknown_arithmetic(hf, known):
        raise UnsupportedModel(
            f"{where}: {unknown} is {brief(hf[unknown])}, with which models of type {hf.get('model_type')} "
            "do not compute"
        )


def _sliding_window(read: ConfigReader) -> int | None:
    """The window of the layers that have one; None if all layers have full attention."""
    if read.get("sliding_window") is None:
        return None
    if read.model_type in ("qwen2_moe", "qwen3_moe") and not read.flag("use_sliding_window", False):
        return None
    if read.model_type in ("qwen2", "qwen3"):
        windowed_from = read.get("max_window_layers")
        if not read.flag("use_sliding_window", False):
            return None
        if not isinstance(windowed_from, int):
            raise CorruptModel(f"{read.where}: max_window_layers is {brief(windowed_from)}, not a whole number")
        if windowed_from >= read.size("num_hidden_layers"):
            return None
    return read.size("sliding_window") if read.get("sliding_window") != 0 else None  # 0: how Qwen2-MoE says "none"


def _num_layers(read: ConfigReader) -> int:
    """Some types (Nemotron-H) count their layers by the list of their kinds, or a word with one letter for each."""
    kinds = read.get("layers_block_type") or read.get("hybrid_override_pattern")
    if read.model_type != "nemotron_h" or kinds is None:
        return read.size("num_hidden_layers", most=MAX_LAYERS)
    if isinstance(kinds, (list, str)) and 1 <= len(kinds) <= MAX_LAYERS:
        return len(kinds)
    raise CorruptModel(f"{read.where}: the kinds of layers are {brief(kinds)}, neither a list nor a word")


def _eos_ids(where: str, *given: Any) -> tuple[int, ...]:
    """All end-of-sequence ids, from both files: each may have one, several or none."""
    ids: set[int] = set()
    for value in given:
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise CorruptModel(f"{where}: eos_token_id holds {brief(token)}, which is no token id")
            ids.add(token)
    return tuple(sorted(ids))
