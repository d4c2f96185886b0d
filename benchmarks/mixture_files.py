"""GGUF files of a few layers in the shapes of released mixtures of experts, with random weights: as `random_gguf`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from random_gguf import pool

VOCABULARY = 2048  # its head is a hundredth of what is read


@dataclass(frozen=True)
class Shape:
    architecture: str  # llama.cpp's name
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    width: int  # inside an expert

    @property
    def is_gpt_oss(self) -> bool:
        return self.architecture == "gpt-oss"


SHAPES = {
    "Qwen3-30B-A3B": Shape("qwen3moe", 2048, 32, 4, 128, 128, 8, 768),
    "gpt-oss-20b": Shape("gpt-oss", 2880, 64, 8, 64, 32, 4, 2880),
}


def write(path: Path, shape: Shape, layers: int, kind: Kind) -> Path:
    """Matrices in `kind`; routers, norms and biases in fp32, as converters leave them. Written tensor by tensor."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape, layers)
    tensors = [*_matrices(shape, layers), *_vectors(shape, layers)]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    for name, dimensions, is_matrix in tensors:
        if is_matrix:
            stored = (*dimensions[:-1], dimensions[-1] // block * size)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)
        else:
            writer.add_tensor_info(name, dimensions, np.dtype(np.float32), 4 * math.prod(dimensions))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random, weights = np.random.default_rng(0), pool(kind)
    for name, dimensions, is_matrix in tensors:
        if is_matrix:
            writer.write_tensor_data(np.resize(weights, math.prod(dimensions) // block * size))
        else:
            values = random.standard_normal(dimensions, np.float32) * np.float32(0.1)
            writer.write_tensor_data(values + np.float32(1) if "norm" in name else values)
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.width)
    writer.add_expert_feed_forward_length(shape.width)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    if shape.is_gpt_oss:
        writer.add_sliding_window(128)


_Tensors = Iterator[tuple[str, tuple[int, ...], bool]]
"""Names, dimensions, and whether they are matrices in the file's format."""


def _matrices(shape: Shape, layers: int) -> _Tensors:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    up, down = (shape.experts, shape.width, hidden), (shape.experts, hidden, shape.width)
    sizes = {
        "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down,
    }  # fmt: skip
    yield "token_embd.weight", (VOCABULARY, hidden), True
    yield "output.weight", (VOCABULARY, hidden), True
    for layer in range(layers):
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}.weight", size, True


def _vectors(shape: Shape, layers: int) -> _Tensors:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = (shape.experts, shape.width)
    sizes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "ffn_gate_inp.weight": (shape.experts, hidden)}
    if shape.is_gpt_oss:
        sizes |= {
            "post_attention_norm.weight": (hidden,), "attn_sinks.weight": (shape.heads,), "attn_q.bias": (queries,),
            "attn_k.bias": (keys,), "attn_v.bias": (keys,), "attn_output.bias": (hidden,),
            "ffn_gate_inp.bias": (shape.experts,), "ffn_gate_exps.bias": inner, "ffn_up_exps.bias": inner,
            "ffn_down_exps.bias": (shape.experts, hidden),
        }  # fmt: skip
    else:
        head = (shape.head_dim,)
        sizes |= {"ffn_norm.weight": (hidden,), "attn_q_norm.weight": head, "attn_k_norm.weight": head}
    yield "output_norm.weight", (hidden,), False
    for layer in range(layers):
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}", size, False
