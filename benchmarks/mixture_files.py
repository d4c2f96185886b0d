"""GGUF files of a few layers in the shapes of real mixtures of experts, with random weights, for llama.cpp and us."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

VOCABULARY = 1024
_PATTERN = 1 << 20  # values that are drawn and repeated: all of them would take longer than timing
_F32 = gguf.GGMLQuantizationType.F32


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


def write(shape: Shape, layers: int, kind: gguf.GGMLQuantizationType, path: Path) -> None:
    """Matrices in `kind`; routers, norms and biases in fp32, as converters leave them."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape, layers)
    random = np.random.default_rng(0)
    drawn = random.standard_normal(_PATTERN, np.float32) * 0.02
    for name, size in _matrices(shape, layers):
        _add_matrix(writer, name, size, kind, drawn)
    for name, size in _vectors(shape, layers):
        values = random.standard_normal(size, np.float32) * (1.0 if "ffn_gate_inp" in name else 0.1)
        writer.add_tensor(name, (values + 1 if "norm" in name else values).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def _matrices(shape: Shape, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (VOCABULARY, hidden)
    yield "output.weight", (VOCABULARY, hidden)
    for layer in range(layers):
        yield f"blk.{layer}.attn_q.weight", (queries, hidden)
        yield f"blk.{layer}.attn_k.weight", (keys, hidden)
        yield f"blk.{layer}.attn_v.weight", (keys, hidden)
        yield f"blk.{layer}.attn_output.weight", (hidden, queries)
        yield f"blk.{layer}.ffn_gate_exps.weight", (shape.experts, shape.width, hidden)
        yield f"blk.{layer}.ffn_up_exps.weight", (shape.experts, shape.width, hidden)
        yield f"blk.{layer}.ffn_down_exps.weight", (shape.experts, hidden, shape.width)


def _vectors(shape: Shape, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, keys = shape.hidden, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "ffn_gate_inp.weight": (shape.experts, hidden)}
    if shape.is_gpt_oss:
        sizes |= {
            "post_attention_norm.weight": (hidden,), "attn_sinks.weight": (shape.heads,),
            "attn_q.bias": (shape.heads * shape.head_dim,), "attn_k.bias": (keys,), "attn_v.bias": (keys,),
            "attn_output.bias": (hidden,), "ffn_gate_inp.bias": (shape.experts,),
            "ffn_gate_exps.bias": (shape.experts, shape.width), "ffn_up_exps.bias": (shape.experts, shape.width),
            "ffn_down_exps.bias": (shape.experts, hidden),
        }  # fmt: skip
    else:
        sizes |= {
            "ffn_norm.weight": (hidden,), "attn_q_norm.weight": (shape.head_dim,),
            "attn_k_norm.weight": (shape.head_dim,),
        }  # fmt: skip
    yield "output_norm.weight", (hidden,)
    for layer in range(layers):
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}", size


def _add_matrix(
    writer: gguf.GGUFWriter,
    name: str,
    size: tuple[int, ...],
    kind: gguf.GGMLQuantizationType,
    drawn: npt.NDArray[np.float32],
) -> None:
    """`drawn`, repeated: of whole rows, so that a quantized row is that of its numbers."""
    *_, columns = size
    rows = len(drawn) // columns
    pattern: npt.NDArray[Any] = gguf.quants.quantize(drawn[: rows * columns].reshape(rows, columns), kind)
    count = int(np.prod(size[:-1]))
    stored = np.tile(pattern, (-(-count // rows), 1))[:count].reshape(*size[:-1], -1)
    writer.add_tensor(name, stored, raw_dtype=kind)
