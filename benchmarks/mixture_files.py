"""GGUF files of a few layers in the shapes of released mixtures of experts, with random weights: as `random_gguf`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType as Kind
from random_gguf import Metadata, Tensor, write_random

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
    """Matrices in `kind`."""
    metadata: Metadata = {
        "block_count": layers, "context_length": 4096, "embedding_length": shape.hidden,
        "feed_forward_length": shape.width, "expert_feed_forward_length": shape.width, "expert_count": shape.experts,
        "expert_used_count": shape.chosen, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    if shape.is_gpt_oss:
        metadata["attention.sliding_window"] = 128
    return write_random(path, shape.architecture, metadata, [*_matrices(shape, layers, kind), *_vectors(shape, layers)])


def _matrices(shape: Shape, layers: int, kind: Kind) -> Iterator[Tensor]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    up, down = (shape.experts, shape.width, hidden), (shape.experts, hidden, shape.width)
    sizes = {
        "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down,
    }  # fmt: skip
    yield "token_embd.weight", (VOCABULARY, hidden), kind
    yield "output.weight", (VOCABULARY, hidden), kind
    for layer in range(layers):
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}.weight", size, kind


def _vectors(shape: Shape, layers: int) -> Iterator[Tensor]:
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
    yield "output_norm.weight", (hidden,), None
    for layer in range(layers):
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}", size, None
