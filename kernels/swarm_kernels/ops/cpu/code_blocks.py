"""4-bit codes in the compiled kernels' weight blocks (codebook.h): from `CodedWeights`, and back. Pure."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from swarm_kernels.ops.base.codebook_linear import CodedWeights, CodeFormat

BLOCK = 16
"""Outputs per packed weight block."""

_PAIR_BYTES = 256  # of 32 inputs of a block
_ALIGNMENT = 64


def shape_of_blocks(weights: CodedWeights) -> torch.Size:
    """`[blocks, bytes]`."""
    outputs, groups, _ = weights.pairs.shape
    count = groups * _PAIR_BYTES + sum(part[0].nbytes for part in _scale_parts(weights.rows(slice(1)))) * BLOCK
    return torch.Size((-(-outputs // BLOCK), -(-count // _ALIGNMENT) * _ALIGNMENT))


def fill_blocks(blocks: torch.Tensor, weights: CodedWeights) -> None:
    """`blocks`: zeros of `shape_of_blocks`, so that padding outputs are 0."""
    outputs = weights.out_features
    whole = outputs // BLOCK
    if whole:
        _fill(blocks[:whole], weights.rows(slice(whole * BLOCK)))
    if whole * BLOCK < outputs:
        last = weights.rows(slice(whole * BLOCK, outputs))
        padding = whole * BLOCK + BLOCK - outputs
        pad = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, padding)) for part in (last.pairs, last.scale)]
        factor = None if last.factor is None else F.pad(last.factor, (0, 0, 0, padding))
        _fill(blocks[whole:], CodedWeights(last.form, pad[0], pad[1], factor))


def _fill(blocks: torch.Tensor, weights: CodedWeights) -> None:
    count, groups = len(blocks), weights.pairs.shape[1]
    end = groups * _PAIR_BYTES
    pairs = weights.pairs.view(count, BLOCK, groups, 4, 4).permute(0, 2, 3, 1, 4)
    blocks[:, :end].view(pairs.shape).copy_(pairs)
    for part in _scale_parts(weights):
        each = part.view(count, BLOCK, part.shape[1], part.shape[2]).transpose(1, 2)  # [block, group, output, byte]
        width = each[0].numel()
        blocks[:, end : end + width].view(each.shape).copy_(each)
        end += width


def _scale_parts(weights: CodedWeights) -> list[torch.Tensor]:
    """In the blocks' order, `[outputs, groups, bytes]` uint8 each."""
    parts = [weights.scale] if weights.factor is None else [weights.factor, weights.scale]
    return [part.contiguous().view(torch.uint8).view(*part.shape, part.itemsize) for part in parts]


def rows_of_blocks(blocks: torch.Tensor, form: CodeFormat, inputs: int, ids: torch.Tensor) -> CodedWeights:
    """Of some outputs, `[m]` ids: the inverse of `fill_blocks`. `inputs`: as packed."""
    groups = inputs // 32
    block, lane, end = blocks[ids // BLOCK], ids % BLOCK, groups * _PAIR_BYTES
    row = torch.arange(len(ids))

    def part(count: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal end
        begin, end = end, end + count * BLOCK * dtype.itemsize
        return block[:, begin:end].contiguous().view(dtype).view(-1, count, BLOCK)[row, :, lane]

    pairs = block[:, :end].view(-1, groups, 4, BLOCK, 4)[row, :, :, lane].flatten(2)
    if form is CodeFormat.MXFP4:
        return CodedWeights(form, pairs, part(groups, torch.uint8))
    if form is CodeFormat.IQ4_NL:
        return CodedWeights(form, pairs, part(groups, torch.float16))
    if form is CodeFormat.NF4:
        return CodedWeights(form, pairs, part(groups // 2, torch.float32))
    factor = part(groups, torch.int8)
    return CodedWeights(form, pairs, part(groups // 8, torch.float16), factor)
