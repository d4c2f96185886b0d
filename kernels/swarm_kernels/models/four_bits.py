"""4-bit weights of checkpoints as our 4-bit kernels hold them, without another rounding of the numbers.

Owns the conversion of scales and zero points: `scale * (number - zero)` becomes `scale * number + minimum`, with
both in fp16 for each 32 inputs. Only the minimum, and a scale that is itself a
product (Q4_K), are rounded, to 11 bits. Pure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from swarm_kernels.models.gguf_dequant import half, nibbles, scales_and_minima
from swarm_kernels.models.gguf_header import QUANT_BLOCKS
from swarm_kernels.ops.base.int4_linear import GROUP_SIZE, FourBitWeights

GGUF_FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
_MOST_ROUNDED = 2.0**-11  # of a number that fp16 holds with all its bits


def four_bits_from_gguf(stored: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> FourBitWeights | None:
    """The blocks of a matrix, `[nbytes]` -> the same weights; None for other types than `GGUF_FOUR_BITS`."""
    name, _, size = QUANT_BLOCKS[ggml_type]
    if name not in GGUF_FOUR_BITS or len(shape) != 2:
        return None
    blocks = torch.from_numpy(stored).view(-1, size)
    d = half(blocks, 0)
    if name == "Q4_0":
        return _four_bits(nibbles(blocks[:, 2:], 1), d, -8.0 * d, shape)
    if name == "Q4_1":
        return _four_bits(nibbles(blocks[:, 4:], 1), d, half(blocks, 2), shape)
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return _four_bits(nibbles(blocks[:, 16:], 4), d * scales, -half(blocks, 2) * minima, shape)


def four_bits_from_groups(
    numbers: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, group: int
) -> FourBitWeights | None:
    """`scale * (numbers - zeros)` with `numbers [N, K]` uint8, `scale` and `zeros [N, K / group]`; no zeros: 8.

    None where a group is not made of whole groups of ours, or fp16 does not hold the scales.
    """
    inputs = numbers.shape[1]
    if inputs % group or group % GROUP_SIZE:
        return None
    wide = scale.float()
    if not ((wide.half().float() - wide).abs() <= _MOST_ROUNDED * wide.abs()).all():
        return None
    minimum = wide * (-8.0 if zeros is None else -zeros.float())
    each = group // GROUP_SIZE
    return _four_bits(
        numbers, wide.repeat_interleave(each, dim=1), minimum.repeat_interleave(each, dim=1), (*numbers.shape,)
    )


def _four_bits(
    numbers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, shape: tuple[int, ...]
) -> FourBitWeights | None:
    outputs, inputs = shape
    scales, minima = scale.half().reshape(outputs, -1), minimum.half().reshape(outputs, -1)
    if not (scales.isfinite().all() and minima.isfinite().all()):
        return None
    return FourBitWeights(numbers.reshape(outputs, inputs).contiguous(), scales.contiguous(), minima.contiguous())
