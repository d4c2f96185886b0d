"""GGUF metadata -> ModelConfig. Owns llama.cpp's metadata keys; the values then go through `hf_config` as if they came
from a config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.models.hf_config import model_config

MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architecture -> Hugging Face model_type; llama.cpp stores Mistral models as Llama."""

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def gguf_model_config(header: GgufHeader, rope_factors: tuple[float, ...], where: str) -> ModelConfig:
    """`rope_factors`: the `rope_freqs` tensor, by which llama.cpp stores Llama 3's scaling; empty without one.

    Raises CorruptModel, UnsupportedModel.
    """
    arch = header.text("general.architecture")
    if arch not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise UnsupportedModel(f"{where} holds a model of architecture {arch[:40]!r}; GGUF files of {known} are read")
    if header.integer(f"{arch}.expert_count", 0):
        raise UnsupportedModel(f"{where} holds a mixture of experts, which is not read from GGUF; use its safetensors")
    hf = _hf_config(header, arch, where)
    hf["rope_parameters"] = _rope(header, arch, where, hf, rope_factors)
    rotated = header.integer(f"{arch}.rope.dimension_count")
    if not hf["head_dim"]:
        raise CorruptModel(f"{where}: the metadata says that an attention head has no dimensions")
    config = model_config(hf, where=where)
    config = replace(config, o_bias="blk.0.attn_output.bias" in header.tensors)
    if rotated in (None, config.head_dim):
        return config
    if not 0 < rotated < config.head_dim:
        raise CorruptModel(f"{where}: {rotated} of the {config.head_dim} dimensions of a head cannot be rotated")
    return replace(config, rope=replace(config.rope, dim=rotated))


def _hf_config(header: GgufHeader, arch: str, where: str) -> dict[str, Any]:
    kind = MODEL_TYPES[arch]

    def need(key: str) -> int:
        value = header.integer(f"{arch}.{key}")
        if value is None or value < 1:
            raise CorruptModel(f"{where}: the metadata has no usable '{arch}.{key}'")
        return value

    heads = need("attention.head_count")
    key_heads = _kv_heads(header, arch, heads)
    bias = "blk.0.attn_q.bias" in header.tensors
    hf: dict[str, Any] = {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        "hidden_size": need("embedding_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": header.integer(f"{arch}.attention.key_length", need("embedding_length") // heads),
        "intermediate_size": need("feed_forward_length"),
        "vocab_size": header.integer(f"{arch}.vocab_size") or header.count("tokenizer.ggml.tokens"),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": header.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({i for key in _EOS_KEYS if (i := header.integer(f"tokenizer.ggml.{key}")) is not None}),
        "pad_token_id": header.integer("tokenizer.ggml.padding_token_id"),
    }
    if kind != "qwen2":
        hf["attention_bias"] = bias
    if kind == "llama":
        hf["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    window = header.integer(f"{arch}.attention.sliding_window")
    if window and window < hf["max_position_embeddings"]:
        raise UnsupportedModel(
            f"{where} has sliding-window attention, which is not read from GGUF; use its safetensors"
        )
    return hf


def _kv_heads(header: GgufHeader, arch: str, heads: int) -> int:
    key = f"{arch}.attention.head_count_kv"
    if header.count(key):
        counts = set(header.numbers(key))
        count = counts.pop()
        if counts:
            raise UnsupportedModel("the layers of this GGUF file differ in their key/value heads; use another model")
        if not isinstance(count, int):
            raise CorruptModel("the key/value heads in the metadata of this GGUF file are no whole numbers")
        return count
    return header.integer(key, heads) or heads


def _rope(header: GgufHeader, arch: str, where: str, hf: dict[str, Any], factors: tuple[float, ...]) -> dict[str, Any]:
    theta = header.number(f"{arch}.rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    legacy = header.number(f"{arch}.rope.scale_linear")
    kind = header.text(f"{arch}.rope.scaling.type", "none" if legacy is None else "linear")
    factor = header.number(f"{arch}.rope.scaling.factor", legacy)
    if factors:
        return rope | _llama3_scaling(factors, float(theta or 10000.0), where)
    if kind == "none" or factor in (None, 1.0):
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return rope
    if kind != "yarn" or header.number(f"{arch}.rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{where} scales its rotary embedding by {kind[:40]!r}, which is not read from GGUF")
    original = header.integer(f"{arch}.rope.scaling.original_context_length")
    rope["original_max_position_embeddings"] = original or hf["max_position_embeddings"]
    for name, key in _YARN.items():
        if (value := header.number(f"{arch}.rope.scaling.{key}")) is not None:
            rope[name] = value
    return rope


def _llama3_scaling(factors: tuple[float, ...], theta: float, where: str) -> dict[str, Any]:
    """Llama 3's scaling, recovered from the divisors of each frequency, `[head_dim / 2]`, all that llama.cpp stores.

    All Llama 3.x releases share the three constants beside the factor; the fit is checked.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = round(max(factors), 4)
    if not (0 < theta < math.inf and all(0 < given < math.inf for given in factors) and factor):
        raise CorruptModel(f"{where}: the factors of its rotary embedding are not positive numbers")
    for i, given in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (i / len(factors))
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        if not math.isclose(given, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise UnsupportedModel(f"{where} scales its rotary embedding in a way that is not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
