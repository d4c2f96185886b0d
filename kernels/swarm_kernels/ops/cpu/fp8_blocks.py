"""E4M3 codes in the compiled kernels' weight blocks (fp8.h): from `Fp8Weights`, and back. Pure."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from swarm_kernels.ops.base.fp8_linear import GROUP_SIZE, INPUTS, Fp8Weights
from swarm_kernels.ops.cpu.code_blocks import BLOCK

_ORDER = (0, 2, 1, 3)  # of a quad's inputs; its own inverse


def shape_of_blocks(weights: Fp8Weights) -> torch.Size:
    """`[blocks, bytes]`."""
    outputs, inputs = weights.codes.shape
    return torch.Size((-(-outputs // BLOCK), BLOCK * (inputs + 4 * -(-inputs // GROUP_SIZE))))


def fill_blocks(blocks: torch.Tensor, weights: Fp8Weights) -> None:
    """The first of `blocks`; padding outputs are 0."""
    outputs, inputs = weights.codes.shape
    padding = (0, 0, 0, -outputs % BLOCK)
    codes, scale = F.pad(weights.codes, padding), F.pad(weights.scale, padding)
    quads = codes.view(-1, BLOCK, inputs // INPUTS, INPUTS)[..., list(_ORDER)].transpose(1, 2)
    blocks = blocks[: len(quads)]
    blocks[:, : BLOCK * inputs].view(quads.shape).copy_(quads)
    scales = scale.view(-1, BLOCK, scale.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    blocks[:, BLOCK * inputs :].view(scales.shape).copy_(scales)


def rows_of_blocks(blocks: torch.Tensor, inputs: int, ids: torch.Tensor) -> Fp8Weights:
    """Of some outputs, `[m]` ids: the inverse of `fill_blocks`."""
    block, lane, row = blocks[ids // BLOCK], ids % BLOCK, torch.arange(len(ids))
    quads = block[:, : BLOCK * inputs].reshape(len(ids), inputs // INPUTS, BLOCK, INPUTS)[row, :, lane]
    scales = block[:, BLOCK * inputs :].contiguous().view(torch.float32)
    scale = scales.view(len(ids), -(-inputs // GROUP_SIZE), BLOCK)[row, :, lane]
    return Fp8Weights(quads[..., list(_ORDER)].flatten(1), scale)
