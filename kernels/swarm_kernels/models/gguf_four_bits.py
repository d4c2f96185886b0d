"""4-bit blocks of GGUF as our 4-bit kernels hold them, without another rounding of the numbers.

Owns the conversion: `scale * number + minimum`, with both in fp16 for each 32 inputs. Those of Q4_K, which are
products, are rounded to 11 bits. Pure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from swarm_kernels.models.gguf_dequant import half, nibbles, scales_and_minima
from swarm_kernels.models.gguf_header import QUANT_BLOCKS
from swarm_kernels.ops.base.int4_linear import FourBitWeights, four_bit_weights

GGUF_FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})


def four_bits_from_gguf(stored: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> FourBitWeights | None:
    """The blocks of a matrix, `[nbytes]` -> the same weights; None for other types than `GGUF_FOUR_BITS`."""
    name, _, size = QUANT_BLOCKS[ggml_type]
    if name not in GGUF_FOUR_BITS or len(shape) != 2:
        return None
    blocks = torch.from_numpy(stored).view(-1, size)
    d = half(blocks, 0)
    if name == "Q4_0":
        return four_bit_weights(nibbles(blocks[:, 2:], 1).reshape(shape), d, -8.0 * d)
    if name == "Q4_1":
        return four_bit_weights(nibbles(blocks[:, 4:], 1).reshape(shape), d, half(blocks, 2))
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return four_bit_weights(nibbles(blocks[:, 16:], 4).reshape(shape), d * scales, -half(blocks, 2) * minima)
