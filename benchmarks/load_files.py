"""Models of random weights whose loading is measured: some hundred megabytes each, written shard by shard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 1536, 4096, 32000, 24, 6
LAYERS = 12
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE, EXPERTS, MIXTURE_LAYERS, MIXTURE_VOCAB = 1920, 16, 4, 4096
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": WIDE, "intermediate_size": WIDE,
    "num_hidden_layers": MIXTURE_LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 4, "vocab_size": MIXTURE_VOCAB, "sliding_window": 128,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": True,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"] * (MIXTURE_LAYERS // 2),
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}  # fmt: skip


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,), "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN), "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def write_llama(folder: Path, shards: int) -> None:
    """bf16, in `shards` files of about the same size."""
    shapes = _llama_shapes()
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    limit = sum(sizes.values()) / shards
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    pending: dict[str, torch.Tensor] = {}
    number = 1
    for name, shape in shapes.items():
        pending[name] = _random(shape, generator)
        weight_map[name] = f"model-{number:05d}-of-{shards:05d}.safetensors"
        if sum(sizes[n] for n in weight_map) >= limit * number or name == "lm_head.weight":
            save_file(pending, folder / weight_map[name], {"format": "pt"})
            pending, number = {}, number + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(LLAMA))


def write_gpt_oss(folder: Path) -> None:
    """Experts in MXFP4, a layer's in one tensor, and the rest in bf16: a shard for each layer."""
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_gpt_oss_shards(generator)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))


def _gpt_oss_shards(generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    def some(*shape: int) -> torch.Tensor:
        return _random(shape, generator)

    queries, keys, hidden = 16 * 64, 4 * 64, WIDE
    yield {"model.embed_tokens.weight": some(MIXTURE_VOCAB, hidden)}
    for layer in range(MIXTURE_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors = {"input_layernorm.weight": some(hidden), "post_attention_layernorm.weight": some(hidden),
                   "self_attn.sinks": some(16), "mlp.router.weight": some(EXPERTS, hidden),
                   "mlp.router.bias": some(EXPERTS), "self_attn.o_proj.weight": some(hidden, queries),
                   "self_attn.o_proj.bias": some(hidden), "mlp.experts.gate_up_proj_bias": some(EXPERTS, 2 * hidden),
                   "mlp.experts.down_proj_bias": some(EXPERTS, hidden)}  # fmt: skip
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            tensors |= {f"self_attn.{name}_proj.weight": some(rows, hidden), f"self_attn.{name}_proj.bias": some(rows)}
        for name, rows in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
            groups = (EXPERTS, rows, hidden // 32)
            tensors[f"mlp.experts.{name}_blocks"] = torch.randint(
                0, 256, (*groups, 16), generator=generator, dtype=torch.uint8
            )
            tensors[f"mlp.experts.{name}_scales"] = torch.full(groups, 118, dtype=torch.uint8)
        yield {prefix + name: tensor for name, tensor in tensors.items()}
    yield {"model.norm.weight": some(hidden), "lm_head.weight": some(MIXTURE_VOCAB, hidden)}


_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, quant: gguf.GGMLQuantizationType) -> None:
    """The same Llama, its matrices in random blocks of `quant`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    edges = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    rng = np.random.default_rng(0)
    for name, shape in _llama_shapes().items():
        if name in edges:
            stored = f"{edges[name]}.weight"
        else:
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            stored = f"blk.{layer}.{_GGUF_NAMES[rest]}.weight"
        if len(shape) == 1:
            writer.add_tensor(stored, np.ones(shape, dtype=np.float32))
        else:
            writer.add_tensor(stored, _blocks(shape, quant, rng), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(shape: tuple[int, ...], quant: gguf.GGMLQuantizationType, rng: np.random.Generator) -> Any:
    """Bytes, `[rows, bytes of a row]`; their first two are an fp16 scale in all formats that are written."""
    values, size = gguf.GGML_QUANT_SIZES[quant]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // values, size), dtype=np.uint8)
    scale = np.float16(0.02 / 4 if quant == gguf.GGMLQuantizationType.Q4_0 else 0.02 / 4096)
    blocks[:, :2] = np.array([scale]).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    values: torch.Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return values.to(torch.bfloat16)
