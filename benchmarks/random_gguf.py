"""GGUF files with random weights in the shapes of released models: to time engines on the very same weights.

A file repeats a few random blocks: speed depends on how many bytes there are, not on their values. Owns the shapes and
the blocks of each format; what `gguf.quants` cannot quantize is drawn block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

Bytes = npt.NDArray[np.uint8]

_POOL = 1 << 18  # weights that are drawn, and repeated
_DEVIATION = 0.02
_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """A decoder like Llama's; the head is the embedding where `tied`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool


SHAPES = {
    "Llama-3.2-1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, True),
    "8 layers of Llama-3.1-8B": Shape(8, 4096, 32, 8, 128, 14336, 2048, False),
}
"""The second with a vocabulary of 2048: its head is 0.5% of what is read."""

FORMATS = {"BF16": (Kind.BF16, Kind.BF16), "Q8_0": (Kind.Q8_0, Kind.Q8_0), "Q4_0": (Kind.Q4_0, Kind.Q6_K),
           "Q4_K": (Kind.Q4_K, Kind.Q6_K)}  # fmt: skip
"""Of layers, and of embedding and head: as llama.cpp's own tool chooses them."""


def write(path: Path, shape: Shape, weights: str) -> Path:
    """A model with the weights in one of `FORMATS`, tensor by tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(_EPSILON)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    tensors = list(_tensors(shape, *FORMATS[weights]))
    for name, rows, columns, kind in tensors:
        if kind is None:
            writer.add_tensor_info(name, (columns,), np.dtype(np.float32), 4 * columns)
        else:
            width = _row_bytes(kind, columns)
            writer.add_tensor_info(name, (rows, width), np.dtype(np.uint8), rows * width, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = {kind: pool(kind) for kind in set(FORMATS[weights])}
    for _, rows, columns, kind in tensors:
        if kind is None:
            writer.write_tensor_data(np.ones(columns, np.float32))
        else:
            writer.write_tensor_data(np.resize(pools[kind], rows * _row_bytes(kind, columns)))
    writer.close()
    return path


def _tensors(shape: Shape, layer: Kind, edge: Kind) -> Iterator[tuple[str, int, int, Kind | None]]:
    """Name, rows, columns and format; a norm has one row and no format."""
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", shape.vocabulary, shape.hidden, edge
    for i in range(shape.layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{norm}.weight", 1, shape.hidden, None
        yield f"blk.{i}.attn_q.weight", heads, shape.hidden, layer
        yield f"blk.{i}.attn_k.weight", kv_heads, shape.hidden, layer
        yield f"blk.{i}.attn_v.weight", kv_heads, shape.hidden, layer
        yield f"blk.{i}.attn_output.weight", shape.hidden, heads, layer
        yield f"blk.{i}.ffn_gate.weight", shape.inner, shape.hidden, layer
        yield f"blk.{i}.ffn_up.weight", shape.inner, shape.hidden, layer
        yield f"blk.{i}.ffn_down.weight", shape.hidden, shape.inner, layer
    yield "output_norm.weight", 1, shape.hidden, None
    if not shape.tied:
        yield "output.weight", shape.vocabulary, shape.hidden, edge


def _row_bytes(kind: Kind, columns: int) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(columns // block * size)


def pool(kind: Kind) -> Bytes:
    """The bytes of `_POOL` weights of about `_DEVIATION`."""
    random = np.random.default_rng(1)
    if kind == Kind.Q4_K:
        return _q4_k(random)
    if kind == Kind.Q6_K:
        return _q6_k(random)
    values = random.standard_normal(_POOL, np.float32) * np.float32(_DEVIATION)
    quantized: Bytes = gguf.quants.quantize(values, kind).view(np.uint8).reshape(-1)
    return quantized


def _q4_k(random: np.random.Generator) -> Bytes:
    """Scale and minimum in fp16, 8 of each in 6 bits, 256 numbers from 0 to 15: w = d s q - m t."""
    blocks = random.integers(0, 256, (_POOL // 256, 144), np.uint8)
    deviation = _DEVIATION / (32 * 4.6)  # of the scales' mean and the numbers' deviation
    blocks[:, :4] = np.array([deviation, 7.5 * deviation], np.float16).view(np.uint8)
    return blocks.reshape(-1)


def _q6_k(random: np.random.Generator) -> Bytes:
    """256 numbers from -32 to 31, 16 scales in 8 bits, one in fp16."""
    blocks = random.integers(0, 256, (_POOL // 256, 210), np.uint8)
    blocks[:, 192:208] = random.integers(8, 25, (_POOL // 256, 16), np.uint8)
    blocks[:, 208:] = np.array([_DEVIATION / (16 * 18.5)], np.float16).view(np.uint8)
    return blocks.reshape(-1)
