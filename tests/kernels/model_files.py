"""Tiny random models on disk, for tests: Hugging Face folders by transformers, GGUF files by gguf-py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(kind: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random fp32 decoder of transformers' `kind`, with norms and biases that are not trivial."""
    torch.manual_seed(seed)
    if kind == "qwen3":
        changes.setdefault("head_dim", 32)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**{**SIZES, **changes})).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter))
    return model


def gguf_name(hf_name: str) -> str:
    stem, _, suffix = hf_name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of query and key rows (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    quant: gguf.GGMLQuantizationType | None = None,
    metadata: Callable[[gguf.GGUFWriter, str], None] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """`model` as llama.cpp's converter writes it; matrices in `quant`. `metadata` may add or replace keys."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", 16) != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if metadata:
        metadata(writer, arch)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and "q_proj" in name:
            weight = permute(weight, config.num_attention_heads)
        elif arch == "llama" and "k_proj" in name:
            weight = permute(weight, config.num_key_value_heads)
        data = weight.numpy()
        if quant is not None and data.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, quant), raw_dtype=quant)
        else:
            writer.add_tensor(gguf_name(name), data)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
