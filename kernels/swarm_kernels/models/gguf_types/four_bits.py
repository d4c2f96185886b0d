"""4-bit blocks of GGUF as our 4-bit kernels hold them, without another rounding of the numbers.

Owns the conversion: `scale * number + minimum`, with both in fp16 for each 32 inputs, of groups with equal steps (of
Q4_K, scales and minima, which are products, are rounded to 11 bits); the others are codes, whose values stay the same
to the last bit. Pure. Layouts: ggml-common.h of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from swarm_kernels.models.gguf_types.blocks import QUANT_BLOCKS
from swarm_kernels.models.gguf_types.dequant import GGUF_CODES, half, nibbles, scales_and_minima
from swarm_kernels.ops.base.codebook_linear import (
    GROUP_SIZE,
    CodedWeights,
    CodeFormat,
    coded_weights,
    pairs_of,
)
from swarm_kernels.ops.base.int4_linear import four_bit_weights
from swarm_kernels.ops.base.matrix import CHUNK_WEIGHTS
from swarm_kernels.ops.base.stored_weights import StoredWeights

GGUF_FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K", *GGUF_CODES})

_GROUP_BYTES = GROUP_SIZE // 2


def four_bits_from_gguf(stored: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> StoredWeights | None:
    """The blocks of a matrix, `[nbytes]` -> the same weights; None for other types than `GGUF_FOUR_BITS`."""
    name, _, size = QUANT_BLOCKS[ggml_type]
    if name not in GGUF_FOUR_BITS or len(shape) != 2:
        return None
    blocks = torch.from_numpy(stored).view(-1, size)
    if name in GGUF_CODES:
        return _codes(blocks, GGUF_CODES[name], shape[0])
    d = half(blocks, 0)
    if name == "Q4_0":
        return four_bit_weights(nibbles(blocks[:, 2:], 1).reshape(shape), d, -8.0 * d)
    if name == "Q4_1":
        return four_bit_weights(nibbles(blocks[:, 4:], 1).reshape(shape), d, half(blocks, 2))
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return four_bit_weights(nibbles(blocks[:, 16:], 4).reshape(shape), d * scales, -half(blocks, 2) * minima)


def _codes(blocks: torch.Tensor, form: CodeFormat, outputs: int) -> CodedWeights | None:
    groups = form.inputs // GROUP_SIZE
    packed = blocks[:, blocks.shape[1] - groups * _GROUP_BYTES :]
    pairs = torch.empty(len(blocks), groups, _GROUP_BYTES, dtype=torch.uint8)
    step = max(1, CHUNK_WEIGHTS // form.inputs)
    for start in range(0, len(blocks), step):
        pairs[start : start + step] = pairs_of(nibbles(packed[start : start + step], groups).flatten(1))
    pairs = pairs.view(outputs, -1, _GROUP_BYTES)
    if form is CodeFormat.MXFP4:
        return coded_weights(form, pairs, blocks[:, 0].reshape(outputs, -1))
    units = blocks[:, :2].contiguous().view(torch.float16).view(outputs, -1)
    if form is CodeFormat.IQ4_NL:
        return coded_weights(form, pairs, units)
    return coded_weights(form, pairs, units, _factors(blocks).view(outputs, -1))


def _factors(blocks: torch.Tensor) -> torch.Tensor:
    """The eight 6-bit scales of IQ4_XS, of which the two upper bits lie in bytes 2 and 3, less 32: `[n, 8]` int8."""
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    upper = blocks[:, 2].int() | blocks[:, 3].int() << 8
    high = upper[:, None] >> torch.arange(0, 16, 2, dtype=torch.int32) & 3
    return (low.int() + (high << 4) - 32).to(torch.int8)
