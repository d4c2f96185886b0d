"""Dequantization of GGUF's blocks with torch. Owns the common block layouts; reads no file.

Each function does gguf-py's fp32 operations in gguf-py's order, so the values agree to the last bit, in a half to
four fifths of its time; rare types use gguf-py itself. Layouts: ggml-common.h of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import UnsupportedModel
from swarm_kernels.device.device import CODES4, INT4
from swarm_kernels.models.gguf_types.blocks import QUANT_BLOCKS
from swarm_kernels.ops.base.codebook_linear import CodeFormat

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types stored as plain values, not blocks."""

_INT4_HOLDS = frozenset({"Q4_0", "Q4_1", "Q4_K", "Q3_K", "Q2_K", "TQ1_0", "TQ2_0"})
"""Groups of equal steps. The others of 4 bits and fewer have unequal ones."""

GGUF_CODES = {form.value.upper(): form for form in (CodeFormat.MXFP4, CodeFormat.IQ4_NL, CodeFormat.IQ4_XS)}

_CHUNK_VALUES = 32000
"""Dequantized at a time: fits the CPU cache, and is just below the 32768 values from which torch uses several threads.
With more runnable threads than cores (several nodes starting on one machine) their barriers cost far more than the
work: on two cores with a load of ten, ten layers of the built-in model took 8 to 12 s without chunks and 0.6 to 0.8 s
with them."""


def dequantize(stored: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Stored bytes, `[nbytes]`, which the result may alias, -> a tensor of `shape`: fp32, or fp16/bf16 where stored as
    such."""
    name, values, size = QUANT_BLOCKS[ggml_type]
    raw = torch.from_numpy(stored)
    if name in PLAIN:
        return raw.view(PLAIN[name]).reshape(shape)
    kernel = _KERNELS.get(name)
    if kernel is None:
        return _by_gguf_py(stored, ggml_type).reshape(shape)
    blocks = raw.view(-1, size)
    out = torch.empty((blocks.shape[0], values))
    step = _CHUNK_VALUES // values
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step]
        out[start : start + step] = kernel(part).view(part.shape[0], values)
    return out.reshape(shape)


def dequantized_dtype(ggml_type: int) -> torch.dtype:
    """Of what `dequantize` returns."""
    return PLAIN.get(QUANT_BLOCKS[ggml_type][0], torch.float32)


def native_format(ggml_type: int) -> torch.dtype:
    """See `ModelSource.native`."""
    name = QUANT_BLOCKS[ggml_type][0]
    if name in PLAIN:
        return torch.bfloat16
    if name in GGUF_CODES:
        return CODES4
    return INT4 if name in _INT4_HOLDS else torch.int8


def _by_gguf_py(stored: npt.NDArray[np.uint8], ggml_type: int) -> torch.Tensor:
    from gguf import GGMLQuantizationType  # 60 to 100 ms to import, and rarely needed
    from gguf.quants import dequantize as gguf_dequantize

    try:
        return torch.from_numpy(gguf_dequantize(stored, GGMLQuantizationType(ggml_type)))
    except (NotImplementedError, ValueError):
        kind = QUANT_BLOCKS[ggml_type][0]
        raise UnsupportedModel(f"{kind} tensors cannot be dequantized here; use a Q4_K_M or Q8_0 file") from None


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at byte `at` of each block, `[n, 1]` fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """`[n, bytes]` -> `[n, groups, 2, bytes / groups]`: of each group of bytes the low halves, then the high halves."""
    packed = packed.reshape(packed.shape[0], groups, -1)
    out = torch.empty((packed.shape[0], groups, 2, packed.shape[2]), dtype=torch.uint8)
    torch.bitwise_and(packed, 0x0F, out=out[:, :, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, :, 1])
    return out


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    signed = nibbles(blocks[:, 2:], 1).view(torch.int8).reshape(-1, 32) - 8
    return half(blocks, 0) * signed


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return (half(blocks, 0) * nibbles(blocks[:, 4:], 1).reshape(-1, 32)).add_(half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and minima that Q4_K and Q5_K pack into 12 bytes, each `[n, 8]`."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], dim=1)
    minima = torch.cat([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], dim=1)
    return scales, minima


def _scaled_groups(blocks: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """`quants [n, 8, 32]` times each group's scale, less its minimum."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    d = (half(blocks, 0) * scales).unsqueeze(-1)
    m = (half(blocks, 2) * minima).unsqueeze(-1)
    return (d * quants).sub_(m)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_groups(blocks, nibbles(blocks[:, 16:], 4).reshape(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = nibbles(blocks[:, 48:], 4).reshape(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).reshape(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _scaled_groups(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = nibbles(blocks[:, :128], 2).reshape(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).reshape(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    quants = (low | (high << 4)).view(torch.int8) - 32
    d = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return d.unsqueeze(-1) * quants.reshape(-1, 16, 16)


_KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
