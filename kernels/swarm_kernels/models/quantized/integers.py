"""Weights of 4 or 8 bit whole numbers with scales: GPTQ, AWQ, and those of compressed-tensors.

Each function does its library's operations in its library's order and precision, so the values agree to the last bit:
`(quants - zero points) * scale` in the dtype of the scales. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.device.device import INT4
from swarm_kernels.models.quantized.packed_tensor import PackedTensor, Parts, Table
from swarm_kernels.ops.base.int4_linear import GROUP_SIZE, FourBitWeights, four_bit_weights

Unpacked = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, int]
"""Numbers `[out, in]` and zero points `[out, groups]`, uint8, scales `[out, groups]`, the zero point without any."""
Numbers = Callable[[Parts], Unpacked]

_MOST_ROUNDED = 2.0**-11  # of a number that fp16 holds with all its bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the eight numbers of an int32 stand in it (AutoAWQ's GEMM version)


def gptq(table: Table, module: str, bits: int, group: int, plus_one: bool) -> PackedTensor:
    """`qweight` [in * bits / 32, out] int32, `qzeros` [groups, out * bits / 32] int32, `scales` [groups, out], and
    `g_idx` [in], the group of each input, if it was quantized by activation order (https://github.com/AutoGPTQ/AutoGPTQ).

    `plus_one`: zero points are stored less one (`checkpoint_format` "gptq", not "gptq_v2").
    """
    each = 32 // bits
    packed_in, outputs = table.shape(f"{module}.qweight", 2)
    inputs = packed_in * each
    parts = {"quants": f"{module}.qweight", "zeros": f"{module}.qzeros", "scale": f"{module}.scales"}
    groups = _groups(inputs, group)
    table.expect(parts["scale"], (groups, outputs))
    table.expect(parts["zeros"], (groups, -(-outputs // each)))
    if f"{module}.g_idx" in table.stored:
        parts["group"] = f"{module}.g_idx"
        table.expect(parts["group"], (inputs,))
    numbers = partial(_gptq_numbers, bits=bits, plus_one=plus_one)
    return _packed((outputs, inputs), table.floating(parts["scale"]), parts, numbers, bits, group)


def awq(table: Table, module: str, group: int) -> PackedTensor:
    """`qweight` [in, out / 8] int32, `qzeros` [groups, out / 8] int32, `scales` [groups, out] (4 bits, AutoAWQ's GEMM
    version, https://github.com/casper-hansen/AutoAWQ)."""
    inputs, packed_out = table.shape(f"{module}.qweight", 2)
    outputs, groups = packed_out * 8, _groups(inputs, group)
    parts = {"quants": f"{module}.qweight", "scale": f"{module}.scales"}
    table.expect(parts["scale"], (groups, outputs))
    if f"{module}.qzeros" in table.stored:
        parts["zeros"] = f"{module}.qzeros"
        table.expect(parts["zeros"], (groups, packed_out))
    return _packed((outputs, inputs), table.floating(parts["scale"]), parts, _awq_numbers, 4, group)


def compressed_int(table: Table, module: str, bits: int, group: int | None) -> PackedTensor:
    """`weight_packed` [out, in * bits / 32] int32, `weight_scale` [out, groups or 1], for asymmetric ones
    `weight_zero_point` [out * bits / 32, groups] int32, and `weight_g_idx` [in] ("pack-quantized" of
    https://github.com/vllm-project/compressed-tensors).

    `group`: inputs that share a scale, None for all. Widths are multiples of what a word holds; `weight_shape`, which
    would say another, is compared when the weight is read.
    """
    each = 32 // bits
    parts = {"quants": f"{module}.weight_packed", "scale": f"{module}.weight_scale"}
    outputs, words = table.shape(parts["quants"], 2)
    inputs = words * each
    groups = _groups(inputs, group or inputs)
    table.expect(parts["scale"], (outputs, groups))
    for role, name, shape in (
        ("zeros", f"{module}.weight_zero_point", (-(-outputs // each), groups)),
        ("group", f"{module}.weight_g_idx", (inputs,)),
        ("shape", f"{module}.weight_shape", (2,)),
    ):
        if name in table.stored:
            parts[role] = name
            table.expect(name, shape)
    numbers = partial(_compressed_numbers, bits=bits)
    return _packed((outputs, inputs), table.floating(parts["scale"]), parts, numbers, bits, group or inputs)


def plain_int8(table: Table, module: str, scale: str, per: float = 1.0) -> PackedTensor:
    """`weight` [out, in] int8 and a scale of each output or of all ([out, 1], [out], [1] or []): `weight * scale / per`
    (compressed-tensors' "int-quantized"; bitsandbytes' LLM.int8 with `SCB` and 127)."""
    outputs, inputs = table.shape(f"{module}.weight", 2)
    table.expect(scale, (outputs, 1), (outputs,), (1,), ())
    dtype = table.floating(scale)
    return PackedTensor(
        (outputs, inputs), dtype, {"quants": f"{module}.weight", "scale": scale}, partial(_unpack_int8, per=per)
    )


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`[rows, n]` int32 -> `[rows, n * 32 / bits]` uint8: the numbers in each word, lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def _groups(inputs: int, group: int) -> int:
    return -(-inputs // group)


def _packed(
    shape: tuple[int, int], dtype: torch.dtype, parts: Mapping[str, str], numbers: Numbers, bits: int, group: int
) -> PackedTensor:
    unpack = partial(_unpack, numbers=numbers, group=group)
    if bits != 4 or "group" in parts:
        return PackedTensor(shape, dtype, parts, unpack)
    return PackedTensor(shape, dtype, parts, unpack, partial(_four_bits, numbers=numbers, group=group), INT4)


def _unpack(parts: Parts, numbers: Numbers, group: int) -> torch.Tensor:
    quants, zeros, scale, middle = numbers(parts)
    group_of = _group_of(quants.shape[1], group, scale.shape[1], parts.get("group"))
    zero = middle if zeros is None else zeros[:, group_of].to(scale.dtype)
    return (quants.to(scale.dtype) - zero).mul_(scale[:, group_of])


def _four_bits(parts: Parts, numbers: Numbers, group: int) -> FourBitWeights | None:
    """`scale * number + minimum` with both in fp16 for each 32 inputs; only the minimum is rounded. None where a group
    is not made of whole groups of ours, or fp16 does not hold the scales."""
    quants, zeros, scale, middle = numbers(parts)
    if quants.shape[1] % group or group % GROUP_SIZE:
        return None
    wide = scale.float()
    if not ((wide.half().float() - wide).abs() <= _MOST_ROUNDED * wide.abs()).all():
        return None
    minimum = wide * (-float(middle) if zeros is None else -zeros.float())
    each = group // GROUP_SIZE
    return four_bit_weights(quants, wide.repeat_interleave(each, dim=1), minimum.repeat_interleave(each, dim=1))


def _gptq_numbers(parts: Parts, bits: int, plus_one: bool) -> Unpacked:
    quants = unpack_words(parts["quants"].T, bits)
    zeros = unpack_words(parts["zeros"], bits)[:, : quants.shape[0]].T
    if plus_one:
        zeros = (zeros + 1) & (2**bits - 1)
    return quants, zeros, parts["scale"].T, 0


def _awq_numbers(parts: Parts) -> Unpacked:
    zeros = parts.get("zeros")
    return _in_order(parts["quants"]).T, None if zeros is None else _in_order(zeros).T, parts["scale"].T, 8


def _in_order(words: torch.Tensor) -> torch.Tensor:
    numbers = unpack_words(words, 4)
    return numbers.view(*words.shape, 8)[..., list(_AWQ_ORDER)].flatten(-2)


def _compressed_numbers(parts: Parts, bits: int) -> Unpacked:
    quants, zeros = unpack_words(parts["quants"], bits), parts.get("zeros")
    if "shape" in parts and parts["shape"].tolist() != list(quants.shape):
        raise UnsupportedModel(
            f"a packed weight has {parts['shape'].tolist()} rows and columns; only whole words are read"
        )
    if zeros is not None:
        zeros = unpack_words(zeros.T, bits).T[: quants.shape[0]]
    return quants, zeros, parts["scale"], 2 ** (bits - 1)


def _unpack_int8(parts: Parts, per: float) -> torch.Tensor:
    scale = parts["scale"]
    scale = scale.reshape(-1, 1) if scale.dim() else scale
    weight = parts["quants"].to(scale.dtype).mul_(scale)
    return weight if per == 1.0 else weight.mul_(1.0 / per)


def _group_of(inputs: int, group: int, groups: int, given: torch.Tensor | None) -> torch.Tensor:
    """The group of each input, `[in]` int64. `given`: as stored. Raises CorruptModel."""
    if given is None:
        return torch.arange(inputs) // group
    if given.is_floating_point() or not 0 <= int(given.min()) <= int(given.max()) < groups:
        raise CorruptModel(f"the checkpoint assigns inputs to groups that are not among its {groups}; fetch it again")
    return given.long()
