"""Weights of 8 and 4 bit floats with scales: fp8 by blocks, MXFP4, NVFP4, and bitsandbytes' NF4.

Each function does its library's operations in its library's order and precision, so the values agree to the last bit.
Pure.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from swarm.errors import CorruptModel
from swarm_kernels.device.device import CODES4, FLOAT8
from swarm_kernels.models.quantized.packed_tensor import FLOATING, PackedTensor, Parts, Table
from swarm_kernels.ops.base import fp8_linear
from swarm_kernels.ops.base.codebook_linear import (
    GROUP_SIZE,
    CodedWeights,
    CodeFormat,
    coded_weights,
    is_nf4,
    pairs_of,
)
from swarm_kernels.ops.base.fp8_linear import GROUP_SIZE as FP8_GROUP
from swarm_kernels.ops.base.fp8_linear import Fp8Weights, fp8_weights

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1
_CHUNK_ROWS = 4096  # of values unpacked at a time, so that indices never take more than the result
_CHUNK_NUMBERS = 1 << 20  # likewise, of an expert
_E8M0 = ("U8", "F8_E8M0")
_NF4_GROUP = CodeFormat.NF4.inputs


def fp8(table: Table, module: str, scale: str, block: tuple[int, int] | None) -> PackedTensor:
    """`weight` [out, in] in E4M3 or E5M2, times a scale of each block, each output, or of all.

    `block`: (outputs, inputs) that share a scale; the last of a row or column may be cut off. fp32 scales or powers of
    two (E8M0). DeepSeek-V3 (arXiv 2412.19437, section 3.3) and Qwen call the scales `weight_scale_inv`.
    """
    outputs, inputs = table.shape(f"{module}.weight", 2)
    allowed: list[tuple[int, ...]] = [(outputs, 1), (outputs,), (1,), (1, 1), ()]
    if block is not None:
        allowed.insert(0, (-(-outputs // block[0]), -(-inputs // block[1])))
    shape = table.expect(scale, *allowed)
    blocked = block if block is not None and shape == allowed[0] else None
    dtype = FLOATING.get(table.stored[scale].dtype, torch.bfloat16)
    parts = {"weight": f"{module}.weight", "scale": scale}
    unpack = partial(_unpack_fp8, block=blocked, dtype=dtype)
    in_groups = blocked is None or blocked[1] % FP8_GROUP == 0 or blocked[1] >= inputs
    if not in_groups or inputs % fp8_linear.INPUTS or table.stored[parts["weight"]].dtype != "F8_E4M3":
        return PackedTensor((outputs, inputs), dtype, parts, unpack)
    return PackedTensor((outputs, inputs), dtype, parts, unpack, partial(_fp8_codes, block=blocked), FLOAT8)


def mxfp4_experts(table: Table, name: str) -> PackedTensor:
    """`{name}_blocks` [experts, out, in / 32, 16] and `{name}_scales` [experts, out, in / 32] bytes -> `[experts, in,
    out]` bf16 (gpt-oss; OCP Microscaling Formats 1.0)."""
    experts, outputs, groups, half = table.shape(f"{name}_blocks", 4)
    table.expect(f"{name}_scales", (experts, outputs, groups))
    if table.stored[f"{name}_blocks"].dtype != "U8" or table.stored[f"{name}_scales"].dtype not in _E8M0:
        raise CorruptModel(f"{table.where}: '{name[:120]}' is not stored in bytes; fetch the model again")
    parts = {"values": f"{name}_blocks", "scale": f"{name}_scales"}
    shape = (experts, groups * half * 2, outputs)
    if half * 2 != GROUP_SIZE:
        return PackedTensor(shape, torch.bfloat16, parts, _unpack_mxfp4_experts, stacked=True)
    return PackedTensor(shape, torch.bfloat16, parts, _unpack_mxfp4_experts, _mxfp4_codes, CODES4, stacked=True)


def fp4(table: Table, module: str, group: int) -> PackedTensor:
    """`weight_packed` [out, in / 2] bytes and `weight_scale` [out, in / group]: E8M0 (MXFP4, groups of 32), or E4M3
    beside one `weight_global_scale` that divides them (NVFP4, groups of 16). As compressed-tensors stores them."""
    outputs, half = table.shape(f"{module}.weight_packed", 2)
    table.expect(f"{module}.weight_scale", (outputs, half * 2 // group))
    parts = {"values": f"{module}.weight_packed", "scale": f"{module}.weight_scale"}
    if f"{module}.weight_global_scale" in table.stored:
        parts["all"] = f"{module}.weight_global_scale"
        table.expect(parts["all"], (1,), ())
    is_mxfp4 = group == GROUP_SIZE and "all" not in parts and half * 2 % group == 0
    is_mxfp4 = is_mxfp4 and table.stored[parts["scale"]].dtype in _E8M0
    shape, unpack = (outputs, half * 2), partial(_unpack_fp4, group=group)
    if not is_mxfp4:
        return PackedTensor(shape, torch.bfloat16, parts, unpack)
    return PackedTensor(shape, torch.bfloat16, parts, unpack, _mxfp4_codes, CODES4)


def nf4(
    module_parts: dict[str, str], shape: tuple[int, ...], dtype: torch.dtype, blocks: tuple[int, int, float]
) -> PackedTensor:
    """bitsandbytes' 4 bits (QLoRA, arXiv 2305.14314): `values` [n / 2, 1] bytes, the higher half first, that index
    `code` [16]; `scale` of each block, itself 8 bits that index `nested_code` [256] where there is a `nested_scale`.

    `blocks`: values that share a scale, scales that share a nested one, and what is added to those.
    """
    unpack = partial(_unpack_nf4, shape=shape, dtype=dtype, blocks=blocks)
    if len(shape) != 2 or shape[1] % _NF4_GROUP or blocks[0] % _NF4_GROUP:
        return PackedTensor(shape, dtype, module_parts, unpack)
    return PackedTensor(shape, dtype, module_parts, unpack, partial(_nf4_codes, shape=shape, blocks=blocks), CODES4)


def _fp8_scale(stored: torch.Tensor) -> torch.Tensor:
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype is torch.uint8 else stored).float()


def _fp8_codes(parts: Parts, block: tuple[int, int] | None) -> Fp8Weights | None:
    """As they are, with a scale for each of our groups of each output."""
    weight, scale = parts["weight"], _fp8_scale(parts["scale"])
    outputs, groups = len(weight), -(-weight.shape[1] // FP8_GROUP)
    if block is None:
        return fp8_weights(weight, scale.reshape(-1, 1).expand(outputs, groups).contiguous())
    across = scale.repeat_interleave(max(1, block[1] // FP8_GROUP), 1)[:, :groups]
    return fp8_weights(weight, across.expand(-1, groups).repeat_interleave(block[0], 0)[:outputs].contiguous())


def _unpack_fp8(parts: Parts, block: tuple[int, int] | None, dtype: torch.dtype) -> torch.Tensor:
    weight, scale = parts["weight"], _fp8_scale(parts["scale"])
    out = torch.empty(weight.shape, dtype=dtype)
    if block is None:
        scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1, 1)
        for at in range(0, len(weight), _CHUNK_ROWS):
            rows = slice(at, at + _CHUNK_ROWS)
            out[rows] = weight[rows].float().mul_(scale[rows] if len(scale) > 1 else scale)
        return out
    rows_each, columns_each = block
    for number, row in enumerate(scale):
        rows = slice(number * rows_each, (number + 1) * rows_each)
        out[rows] = weight[rows].float().mul_(row.repeat_interleave(columns_each)[: weight.shape[1]])
    return out


def _fp4_pairs(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[n, m]` bytes -> `[n, 2 m]`: the lower half of each byte first."""
    table = torch.tensor(_FP4_VALUES, dtype=dtype)
    pairs = torch.stack((values & 0xF, values >> 4), dim=-1).flatten(-2)
    return table[pairs.int()]


def _mxfp4_codes(parts: Parts) -> CodedWeights | None:
    """`values` [out, ...] of in / 2 bytes, the lower half of each first, and `scale` [out, in / 32], as they are."""
    values = parts["values"].reshape(len(parts["values"]), -1)
    pairs = torch.empty(len(values), values.shape[1] // 16, 16, dtype=torch.uint8)
    step = max(1, _CHUNK_NUMBERS // max(1, 2 * values.shape[1]))
    for at in range(0, len(values), step):
        some = values[at : at + step]
        pairs[at : at + step] = pairs_of(torch.stack((some & 0xF, some >> 4), dim=-1).flatten(1))
    return coded_weights(CodeFormat.MXFP4, pairs, parts["scale"].view(torch.uint8))


def _unpack_mxfp4_experts(parts: Parts) -> torch.Tensor:
    blocks, scale = parts["values"], parts["scale"]
    experts, outputs, groups, half = blocks.shape
    out = torch.empty((experts, groups * half * 2, outputs), dtype=torch.bfloat16)
    step = max(1, _CHUNK_NUMBERS // (groups * half * 2))
    for expert in range(experts):
        for at in range(0, outputs, step):
            rows = slice(at, at + step)
            exponents = scale[expert, rows].int() - 127
            values = torch.ldexp(_fp4_pairs(blocks[expert, rows], torch.bfloat16), exponents.unsqueeze(-1))
            out[expert, :, rows] = values.flatten(1).T
    return out


def _unpack_fp4(parts: Parts, group: int) -> torch.Tensor:
    values, scale = parts["values"], parts["scale"]
    by_all = parts.get("all")
    if scale.dtype is torch.uint8:  # E8M0
        scale = torch.tensor(2.0, dtype=torch.bfloat16) ** (scale.int() - 127).to(torch.bfloat16)
    scale = scale.to(torch.bfloat16)
    if by_all is not None:
        scale = scale / by_all
    out = torch.empty((values.shape[0], values.shape[1] * 2), dtype=torch.bfloat16)
    for at in range(0, len(values), _CHUNK_ROWS):
        rows = slice(at, at + _CHUNK_ROWS)
        numbers = _fp4_pairs(values[rows], torch.bfloat16).to(scale.dtype)
        out[rows] = numbers.mul_(scale[rows].repeat_interleave(group, dim=1))
    return out


def _nf4_scale(parts: Parts, nested_size: int, offset: float) -> torch.Tensor:
    """Of each block."""
    scale = parts["scale"].flatten()
    if "nested_scale" not in parts:
        return scale
    nested = parts["nested_scale"].flatten().repeat_interleave(nested_size)[: len(scale)]
    return parts["nested_code"][scale.int()].mul_(nested).add_(offset)


def _nf4_codes(parts: Parts, shape: tuple[int, int], blocks: tuple[int, int, float]) -> CodedWeights | None:
    """As they are, with the scales unpacked. None of another table than NF4's."""
    size, nested_size, offset = blocks
    if not is_nf4(parts["code"]):
        return None
    outputs, inputs = shape
    scale = _nf4_scale(parts, nested_size, offset).float().repeat_interleave(size // _NF4_GROUP)
    values = parts["values"].view(outputs, inputs // 2)
    pairs = torch.empty(outputs, inputs // GROUP_SIZE, GROUP_SIZE // 2, dtype=torch.uint8)
    for at in range(0, outputs, _CHUNK_ROWS):
        some = values[at : at + _CHUNK_ROWS]
        pairs[at : at + _CHUNK_ROWS] = pairs_of(torch.stack((some >> 4, some & 0xF), dim=-1).flatten(1))
    scales = scale[: outputs * inputs // _NF4_GROUP].view(outputs, -1)
    return coded_weights(CodeFormat.NF4, pairs, scales.contiguous())


def _unpack_nf4(
    parts: Parts, shape: tuple[int, ...], dtype: torch.dtype, blocks: tuple[int, int, float]
) -> torch.Tensor:
    size, nested_size, offset = blocks
    scale, values = _nf4_scale(parts, nested_size, offset), parts["values"].flatten()
    out = torch.empty(values.numel() * 2, dtype=dtype)
    code, step = parts["code"].float(), size * _CHUNK_ROWS
    for at in range(0, out.numel(), step):
        some = values[at // 2 : (at + step) // 2]
        numbers = code[torch.stack((some >> 4, some & 0xF), dim=-1).flatten().int()]
        numbers.mul_(scale[at // size : (at + step) // size].repeat_interleave(size)[: numbers.numel()])
        out[at : at + step] = numbers
    return out[: math.prod(shape)].reshape(shape)
