"""A tiny model of transformers as a GGUF file, as llama.cpp's converter writes it.

Follows `conversion/` of https://github.com/ggml-org/llama.cpp, not our reader: names by gguf-py's `TensorNameMap` from
the names of the checkpoint that transformers saves, and the converter's permutations, shifts and splits.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

Tensors = Iterator[tuple[str, torch.Tensor]]
Config = dict[str, Any]

ARCHITECTURES = {
    "llama": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE", "gpt_oss": "GPT_OSS", "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2",
    "gemma": "GEMMA", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3", "phi3": "PHI3", "granite": "GRANITE",
    "granitemoe": "GRANITE_MOE", "granitemoeshared": "GRANITE_MOE", "glm4": "GLM4", "glm4_moe": "GLM4_MOE",
    "olmo2": "OLMO2", "olmo3": "OLMO2", "olmoe": "OLMOE", "smollm3": "SMOLLM3", "llama4_text": "LLAMA4",
    "minimax_m2": "MINIMAXM2", "lfm2": "LFM2", "lfm2_moe": "LFM2MOE", "seed_oss": "SEED_OSS",
    "phimoe": "PHIMOE", "mimo_v2_flash": "MIMO2",
}  # fmt: skip
_PERMUTED = ("llama", "mixtral", "granite", "granitemoe", "granitemoeshared", "smollm3")
_SIGMOID, _SOFTMAX = gguf.ExpertGatingFuncType.SIGMOID, gguf.ExpertGatingFuncType.SOFTMAX


def convert(
    model: PreTrainedModel,
    path: Path,
    quant: gguf.GGMLQuantizationType | None = None,
    *,
    split_latents: bool = True,
    change: Callable[[gguf.GGUFWriter, str], None] | None = None,
) -> Path:
    """`quant`: of matrices and experts whose rows have whole blocks. `split_latents`: keys and values of multi-head
    latent attention apart, as since May 2025. `change` may add keys."""
    config = {**model.config.to_dict(), "model_type": model.config.model_type}
    kind = config["model_type"]
    arch = gguf.MODEL_ARCH[ARCHITECTURES[kind]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _shared_parameters(writer, config)
    _parameters(writer, kind, config, split_latents)
    if change:
        change(writer, gguf.MODEL_ARCH_NAMES[arch])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"] + 1)
    for name, tensor in _all_tensors(kind, config, _checkpoint(model), split_latents):
        mapped = name if name.startswith("rope_") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, f"gguf-py has no name for {name}"
        data = tensor.float().contiguous().numpy()
        blocks = gguf.GGML_QUANT_SIZES[quant][0] if quant is not None else 0
        if quant is not None and data.ndim > 1 and data.shape[-1] % blocks == 0 and "ffn_gate_inp" not in mapped:
            writer.add_tensor(mapped, gguf.quants.quantize(data, quant), raw_dtype=quant)
        else:
            writer.add_tensor(mapped, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _checkpoint(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As transformers saves it: experts apart where released checkpoints have them so."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(Path(folder).glob("*.safetensors"))
        return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}


def _shared_parameters(writer: gguf.GGUFWriter, c: Config) -> None:
    """TextModel.set_gguf_parameters."""
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    if c["model_type"] == "llama4_text":
        writer.add_feed_forward_length(c["intermediate_size_mlp"])
    else:
        writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    latent = "kv_lora_rank" in c
    if c["model_type"].startswith("lfm2"):
        writer.add_head_count_kv([0 if kind == "conv" else c["num_key_value_heads"] for kind in c["layer_types"]])
    elif c["model_type"] == "mimo_v2_flash":
        heads = c["num_key_value_heads"]
        writer.add_head_count_kv([heads * (1 + (kind == "sliding_attention")) for kind in c["layer_types"]])
    else:
        writer.add_head_count_kv(1 if latent else c["num_key_value_heads"])  # and all of them in older files
    if c["model_type"] not in ("phi3", "phimoe"):
        _rope_parameters(writer, c)
    writer.add_layer_norm_rms_eps(c["norm_eps"] if "norm_eps" in c else c["rms_norm_eps"])
    experts = c.get("num_local_experts") or c.get("num_experts") or c.get("n_routed_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c["num_experts_per_tok"])
    if c.get("n_group") is not None:
        writer.add_expert_group_count(c["n_group"])
        writer.add_expert_group_used_count(c["topk_group"])
    if c.get("head_dim") is not None and not latent:
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["v_head_dim"] if c["model_type"] == "mimo_v2_flash" else c["head_dim"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_file_type(0)
    writer.add_eos_token_id(2)


def _rope_parameters(writer: gguf.GGUFWriter, c: Config) -> None:
    rope = c["rope_parameters"].get("full_attention", c["rope_parameters"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    local = c["rope_parameters"].get("sliding_attention", {}).get("rope_theta")
    if local is not None:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local)


def _parameters(w: gguf.GGUFWriter, kind: str, c: Config, split_latents: bool) -> None:
    """What the classes of the converter add."""
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rope = c["rope_parameters"]
    if kind in ("mixtral", "llama", "smollm3", "granite", "granitemoe", "granitemoeshared", "llama4_text"):
        w.add_rope_dimension_count(head_dim)
    if kind in ("glm4", "glm4_moe"):
        w.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if kind in ("qwen2_moe", "qwen3_moe"):
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if kind == "qwen2_moe":
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if kind.startswith("granite"):
        w.add_attention_scale(c["attention_multiplier"])
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_logit_scale(c["logits_scaling"])
    if kind == "granitemoeshared":
        w.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    if kind == "gpt_oss":
        w.add_sliding_window(c["sliding_window"])
        w.add_expert_feed_forward_length(c["intermediate_size"])
    if kind in ("gemma2", "gemma3_text"):
        if kind == "gemma2":
            w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        if c["final_logit_softcapping"]:
            w.add_final_logit_softcapping(c["final_logit_softcapping"])
        w.add_sliding_window(c["sliding_window"])
    if kind in ("phi3", "phimoe"):
        _phi3_parameters(w, c)
    if kind == "mimo_v2_flash":  # of a released config, which counts the tokens before a row
        w.add_sliding_window(c["sliding_window"] - 1)
        w.add_sliding_window_pattern([int(kind == "sliding_attention") for kind in c["layer_types"]])
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        w.add_rope_dimension_count(int(head_dim * rope["full_attention"]["partial_rotary_factor"]))
        w.add_float32(f"{w.arch}.attention.value_scale", c["attention_value_scale"])
        w.add_nextn_predict_layers(0)
    if kind == "olmo3":
        w.add_sliding_window(c["sliding_window"])
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])
    if kind == "minimax_m2":
        w.add_expert_feed_forward_length(c["intermediate_size"])
        w.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        w.add_expert_gating_func(_SIGMOID)
    if kind == "llama4_text":
        w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
        w.add_expert_feed_forward_length(c["intermediate_size"])
    if kind == "glm4_moe":
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        w.add_expert_gating_func(_SIGMOID)
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_nextn_predict_layers(0)
    if kind.startswith("lfm2"):
        w.add_shortconv_l_cache(c["conv_L_cache"])
    if kind == "lfm2_moe":
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        w.add_leading_dense_block_count(c["num_dense_layers"])
        w.add_expert_gating_func(_SIGMOID)
    if kind.startswith("deepseek"):
        _deepseek_parameters(w, kind, c, split_latents)


def _phi3_parameters(w: gguf.GGUFWriter, c: Config) -> None:
    rope = c["rope_parameters"]
    original = rope.get("original_max_position_embeddings") or c.get("original_max_position_embeddings", 4096)
    w.add_rope_scaling_orig_ctx_len(original)
    w.add_rope_dimension_count(
        int(rope.get("partial_rotary_factor", 1.0) * c["hidden_size"]) // c["num_attention_heads"]
    )
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_sliding_window(c["sliding_window"] or 0)
    if rope.get("long_factor"):
        scale = c["max_position_embeddings"] / original
        w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _deepseek_parameters(w: gguf.GGUFWriter, kind: str, c: Config, split_latents: bool) -> None:
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    if c["q_lora_rank"] is not None:
        w.add_q_lora_rank(c["q_lora_rank"])
    w.add_kv_lora_rank(c["kv_lora_rank"])
    if split_latents:
        w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
        w.add_value_length(c["kv_lora_rank"])
        w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        w.add_value_length_mla(c["v_head_dim"])
    else:
        w.add_key_length(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        w.add_value_length(c["v_head_dim"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    if c.get("norm_topk_prob"):
        w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_gating_func(_SIGMOID if kind == "deepseek_v3" else _SOFTMAX)
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    if (mscale := c["rope_parameters"].get("mscale_all_dim")) is not None:
        w.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """LlamaModel.permute."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def _all_tensors(kind: str, c: Config, stored: dict[str, torch.Tensor], split_latents: bool) -> Tensors:
    for name, tensor in _merged_experts(stored):
        if name == "lm_head.weight" and (c["tie_word_embeddings"] or kind.startswith("gemma")):
            continue
        yield from _modified(kind, c, name, tensor, split_latents)
    rope = c["rope_parameters"]
    for length in ("long", "short"):
        if rope.get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"])
    if rope.get("rope_type") == "llama3":
        yield (
            "rope_freqs.weight",
            _llama3_factors(rope, c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]),
        )


def _llama3_factors(rope: Config, dim: int) -> torch.Tensor:
    """LlamaModel.generate_extra_tensors."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for freq in (1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))).tolist():
        wavelength = 2 * math.pi / freq
        if wavelength < 8192 / high:
            factors.append(1.0)
        elif wavelength > 8192 / low:
            factors.append(rope["factor"])
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


def _merged_experts(stored: dict[str, torch.Tensor]) -> Tensors:
    """Experts of one name are stacked, `[experts, rows, columns]`."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in stored.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            yield name, tensor
    for name, parts in experts.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        assert layer is not None
        if re.search(r"\.w[123]\.weight", name):  # as MOE_BLOCK_SPARSE names them
            name = f"layers.{layer[1]}.feed_forward.experts.{name.split('.')[-2]}.weight"
        yield name, torch.stack([parts[expert] for expert in range(len(parts))])


def _modified(kind: str, c: Config, name: str, tensor: torch.Tensor, split_latents: bool) -> Tensors:
    """`modify_tensors` of the classes of the converter."""
    if kind in _PERMUTED and name.endswith(("q_proj.weight", "q_proj.bias")):
        tensor = permute(tensor, c["num_attention_heads"])
    elif kind in _PERMUTED and name.endswith(("k_proj.weight", "k_proj.bias")):
        tensor = permute(tensor, c["num_key_value_heads"])
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1
    if name.endswith("e_score_correction_bias"):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith(".expert_bias"):
        name += ".bias"
    if "conv.conv" in name:
        tensor = tensor.squeeze(1)
    if name.endswith((".sinks", ".attention_sink_bias")):
        name += ".weight"
    if kind == "gpt_oss" and ".experts." in name:
        yield from _gpt_oss_experts(name, tensor)
    elif kind == "llama4_text" and ".experts." in name:
        yield from _llama4_experts(name, tensor)
    elif kind.startswith("granitemoe") and "_linear.weight" in name:
        yield from _granite_experts(name, tensor)
    elif "kv_b_proj" in name and split_latents:
        keys = c["qk_nope_head_dim"]
        both = tensor.view(c["num_attention_heads"], keys + c["v_head_dim"], tensor.shape[-1])
        k_b, v_b = torch.split(both, [keys, c["v_head_dim"]], dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), k_b.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), v_b
    else:
        yield name, tensor


def _gpt_oss_experts(name: str, tensor: torch.Tensor) -> Tensors:
    if name.endswith("_bias"):
        name = name.replace("_bias", ".bias")
    else:
        name, tensor = name + ".weight", tensor.transpose(-1, -2)
    if "gate_up_proj" not in name:
        yield name, tensor
        return
    gate, up = tensor[:, ::2], tensor[:, 1::2]
    yield name.replace("gate_up_proj", "gate_proj"), gate
    yield name.replace("gate_up_proj", "up_proj"), up


def _llama4_experts(name: str, tensor: torch.Tensor) -> Tensors:
    tensor = tensor.transpose(-1, -2)
    if name.endswith("down_proj"):
        yield name + ".weight", tensor
        return
    gate, up = tensor.chunk(2, dim=-2)
    yield name.replace("gate_up_proj", "gate_proj.weight"), gate
    yield name.replace("gate_up_proj", "up_proj.weight"), up


def _granite_experts(name: str, tensor: torch.Tensor) -> Tensors:
    layer = name.split(".")[2]
    shared = "shexp" if "shared_mlp" in name else "exps"
    if "output_linear" in name:
        yield name, tensor
        return
    gate, up = tensor.chunk(2, dim=-2)
    names = {"exps": "mlp.experts.{}_proj.weight", "shexp": "mlp.shared_experts.{}_proj.weight"}[shared]
    yield f"model.layers.{layer}.{names.format('gate')}", gate
    yield f"model.layers.{layer}.{names.format('up')}", up
