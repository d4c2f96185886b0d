"""GGUF files with random weights in the shapes of released models: to time engines on the very same weights.

A file repeats a few random blocks: speed depends on how many bytes there are, not on their values. Owns the writing,
the shapes of dense models and the blocks of each format; what `gguf.quants` cannot quantize is drawn block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """A model with the weights in one of `FORMATS`."""
    metadata: Metadata = {
        "block_count": shape.layers, "context_length": 8192, "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 500000.0, "attention.layer_norm_rms_epsilon": _EPSILON, "vocab_size": shape.vocabulary,
    }  # fmt: skip
    return write_random(path, "llama", metadata, list(_tensors(shape, *FORMATS[weights])))


Metadata = dict[str, int | float]
"""Keys of the architecture, without its name."""

Tensor = tuple[str, tuple[int, ...], Kind | None]
"""Name, dimensions, and the format of a matrix; None: fp32, as converters leave routers, norms and biases."""


def write_random(path: Path, architecture: str, metadata: Metadata, tensors: Sequence[Tensor]) -> Path:
    """A file without a tokenizer, tensor by tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    for name, dimensions, kind in tensors:
        if kind is None:
            writer.add_tensor_info(name, dimensions, np.dtype(np.float32), 4 * math.prod(dimensions))
        else:
            stored = (*dimensions[:-1], _row_bytes(kind, dimensions[-1]))
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random, pools = np.random.default_rng(0), {kind: pool(kind) for _, _, kind in tensors if kind is not None}
    for name, dimensions, kind in tensors:
        if kind is None:
            values = random.standard_normal(dimensions, np.float32) * np.float32(0.1)
            writer.write_tensor_data(values + np.float32(1) if "norm" in name else values)
        else:
            count = math.prod(dimensions[:-1]) * _row_bytes(kind, dimensions[-1])
            writer.write_tensor_data(np.resize(pools[kind], count))
    writer.close()
    return path


def _tensors(shape: Shape, layer: Kind, edge: Kind) -> Iterator[Tensor]:
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocabulary, shape.hidden), edge
    for i in range(shape.layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{norm}.weight", (shape.hidden,), None
        yield f"blk.{i}.attn_q.weight", (heads, shape.hidden), layer
        yield f"blk.{i}.attn_k.weight", (kv_heads, shape.hidden), layer
        yield f"blk.{i}.attn_v.weight", (kv_heads, shape.hidden), layer
        yield f"blk.{i}.attn_output.weight", (shape.hidden, heads), layer
        yield f"blk.{i}.ffn_gate.weight", (shape.inner, shape.hidden), layer
        yield f"blk.{i}.ffn_up.weight", (shape.inner, shape.hidden), layer
        yield f"blk.{i}.ffn_down.weight", (shape.hidden, shape.inner), layer
    yield "output_norm.weight", (shape.hidden,), None
    if not shape.tied:
        yield "output.weight", (shape.vocabulary, shape.hidden), edge


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
