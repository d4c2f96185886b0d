"""Linear layers with their weights packed for the compiled CPU kernels.

Weights are read, quantized and packed some rows at a time: beside the packed ones, memory holds a few megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import KernelError
from swarm_kernels.ops.base import int4_linear, int8_linear
from swarm_kernels.ops.base.codebook_linear import CodedWeights, CodeFormat
from swarm_kernels.ops.base.fp8_linear import Fp8Weights
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.ops.base.matrix import Matrix, row_chunks
from swarm_kernels.ops.cpu import binding, cpu_library, fp8_blocks
from swarm_kernels.ops.cpu.code_blocks import BLOCK, fill_blocks, rows_of_blocks, shape_of_blocks

_INPUTS_PER_WORD = {binding.FP32: 1, binding.BF16: 2, binding.INT8: 4}
"""Consecutive inputs of one output stored next to each other."""

_ZERO_POINT = 128
"""Added to int8 weights, because the dot-product instructions take them unsigned."""

_INT4_BLOCK = 320
"""Bytes of int4.h's Int4Block."""

_CODES = {
    CodeFormat.MXFP4: binding.MXFP4,
    CodeFormat.IQ4_NL: binding.IQ4_NL,
    CodeFormat.IQ4_XS: binding.IQ4_XS,
    CodeFormat.NF4: binding.NF4,
}
_CODE_FORMATS = {number: form for form, number in _CODES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights in blocks of 16 outputs, the last padded: fp32 `[N/16, K, 16, 1]`, bf16 `[N/16, K/2, 16, 2]`, int8
    `[N/16, K/4, 16, 4]`, int4 `[N/16, K/32, 320]` (see `_int4_blocks`), codes of 4 and
    8 bits `[N/16, bytes]` (`code_blocks`, `fp8_blocks`).

    fp32 and bf16: one chain of fp32 multiply-adds in ascending order of k (bf16, whose inputs are rounded to bf16 too:
    of each pair the second first). fp8: the same of each 128 inputs (see `fp8_linear`). int8, int4 and codes: exact
    integer sums per group (see `int8_linear`, `int4_linear`, `codebook_linear`). Hence results are batch-invariant,
    bit for bit, on any number of threads.
    """

    packed: torch.Tensor
    scale: torch.Tensor | None  # int8: [N rounded up to 16] fp32
    bias: torch.Tensor | None  # [N rounded up to 16] fp32
    in_features: int
    out_features: int
    desc: binding.LinearDesc

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.packed, self.scale, self.bias) if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.device.type != "cpu":
            raise KernelError(f"a linear layer of {self.in_features} inputs was given {tuple(x.shape)} on {x.device}")
        wide = x.to(torch.float32).contiguous()
        out = torch.empty(x.shape[0], self.out_features)
        if x.shape[0]:
            cpu_library.check(
                cpu_library.loaded().swarm_linear(self.desc, wide.data_ptr(), wide.shape[0], out.data_ptr())
            )
        return out.to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.desc.format == binding.INT4:
            return _int4_rows(self.packed, ids)[:, : self.in_features]
        if self.desc.format == binding.FP8:
            return fp8_blocks.rows_of_blocks(self.packed, self.in_features, ids).embedding_rows(slice(None))
        codes = _CODE_FORMATS.get(self.desc.format)
        if codes is not None:
            found = rows_of_blocks(self.packed, codes, self.in_features, ids)
            return found.embedding_rows(torch.arange(len(ids)))
        weights = self.packed[ids // BLOCK, :, ids % BLOCK].flatten(1)[:, : self.in_features]
        if self.scale is None:
            return weights
        return (weights.float() - _ZERO_POINT) * self.scale[ids, None]


def linear_desc(linear: Linear | None) -> binding.LinearDesc:
    """Of a packed one; without weights for None."""
    if linear is None:
        return binding.LinearDesc()
    assert isinstance(linear, PackedLinear)  # the caller has looked
    return linear.desc


def pack_linear(weight: Matrix, bias: torch.Tensor | None) -> PackedLinear:
    """See `dispatch.pack_linear`; `weight` on the CPU, bf16 or fp32."""
    halves = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0  # bf16 weights are read in pairs of inputs
    form, dtype = (binding.BF16, torch.bfloat16) if halves else (binding.FP32, torch.float32)
    packed = _empty_blocks(weight.shape, dtype, form)
    for rows, part in row_chunks(weight, BLOCK):
        _fill_blocks(packed, rows, part.to(dtype))
    return _describe(packed, None, _padded(bias), weight.shape, form)


def quantize_linear(weight: Matrix, bias: torch.Tensor | None) -> PackedLinear:
    """See `dispatch.quantize_linear`; `weight` on the CPU."""
    int8_linear.check_inputs(weight.shape[1])
    packed, scale = _empty_blocks(weight.shape, torch.uint8, binding.INT8), torch.empty(weight.shape[0])
    for rows, part in row_chunks(weight, BLOCK):
        numbers, scale[rows] = int8_linear.quantize_weight(part)
        _fill_blocks(packed, rows, numbers.view(torch.uint8) ^ _ZERO_POINT)  # int8 + 128
    return _describe(packed, _padded(scale), _padded(bias), weight.shape, binding.INT8)


def quantize_linear4(weight: Matrix, bias: torch.Tensor | None) -> PackedLinear:
    """See `dispatch.quantize_linear`; `weight` on the CPU."""
    packed = _empty_int4_blocks(weight.shape)
    for rows, part in row_chunks(weight, BLOCK):
        _fill_int4_blocks(packed, rows, int4_linear.quantize_weight(part))
    return _describe(packed, None, _padded(bias), weight.shape, binding.INT4)


def pack_four_bits(weights: int4_linear.FourBitWeights, bias: torch.Tensor | None, in_features: int) -> PackedLinear:
    """See `dispatch.pack_stored`; `weights` on the CPU."""
    shape = torch.Size((weights.out_features, in_features))
    packed = _empty_int4_blocks(shape)
    for rows, _ in row_chunks(weights.numbers, BLOCK):
        _fill_int4_blocks(packed, rows, weights.rows(rows))
    return _describe(packed, None, _padded(bias), shape, binding.INT4)


def pack_codes(weights: CodedWeights, bias: torch.Tensor | None) -> PackedLinear:
    """See `dispatch.pack_stored`; `weights` on the CPU."""
    packed = _empty_huge(shape_of_blocks(weights), torch.uint8).zero_()
    fill_blocks(packed, weights)
    shape = torch.Size((weights.out_features, weights.padded_inputs))
    return _describe(packed, None, _padded(bias), shape, _CODES[weights.form])


def pack_fp8(weights: Fp8Weights, bias: torch.Tensor | None) -> PackedLinear:
    """See `dispatch.pack_stored`; `weights` on the CPU."""
    packed = _empty_huge(fp8_blocks.shape_of_blocks(weights), torch.uint8).zero_()
    for rows, _ in row_chunks(weights.codes, BLOCK):
        fp8_blocks.fill_blocks(packed[rows.start // BLOCK :], weights.rows(rows))
    shape = torch.Size((weights.out_features, weights.padded_inputs))
    return _describe(packed, None, _padded(bias), shape, binding.FP8)


def _fill_int4_blocks(packed: torch.Tensor, rows: slice, weights: int4_linear.FourBitWeights) -> None:
    """Outputs `rows`, a range of whole blocks but for the last one's end."""
    blocks = _int4_blocks(weights)
    packed[rows.start // BLOCK :][: len(blocks)] = blocks


def _int4_blocks(weights: int4_linear.FourBitWeights) -> torch.Tensor:
    """int4.h's Int4Block, `[N/16, K/32, 320]` bytes: 16 scales, 16 minima, then 4 x 16 x 4 pairs of numbers.

    Of the 8 quads of an output's 32 numbers, the even ones are the low nibbles of the bytes, the odd ones the high.
    """
    padding = -weights.numbers.shape[0] % BLOCK
    numbers, scale, minimum = (F.pad(x, (0, 0, 0, padding)) for x in (weights.numbers, weights.scale, weights.minimum))
    quads = numbers.view(-1, BLOCK, scale.shape[1], 4, 2, 4)  # [block, output, group, pair, of the pair, input]
    pairs = (quads[..., 0, :] | quads[..., 1, :] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    headers = torch.stack((scale, minimum)).view(2, -1, BLOCK, scale.shape[1]).permute(1, 3, 0, 2)
    return torch.cat((headers.flatten(2).contiguous().view(torch.uint8), pairs), 2)


def _int4_rows(packed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[m]` ids of outputs -> their weights in fp32, padded: the inverse of `_int4_blocks`."""
    blocks, lane, row = packed[ids // BLOCK], ids % BLOCK, torch.arange(len(ids))
    count, groups, _ = blocks.shape
    headers = blocks[..., : 4 * BLOCK].contiguous().view(torch.float16).view(count, groups, 2, BLOCK)[row, ..., lane]
    pairs = blocks[..., 4 * BLOCK :].reshape(count, groups, 4, BLOCK, 4)[row, :, :, lane]  # [m, K/32, 4, 4]
    numbers = torch.stack((pairs & 15, pairs >> 4), 3).flatten(2)
    return (numbers * headers[..., :1].float() + headers[..., 1:].float()).flatten(1)


def _fill_blocks(packed: torch.Tensor, rows: slice, weight: torch.Tensor) -> None:
    """Outputs `rows`, a range of whole blocks but for the last one's end. `weight [rows, K]`; padding is zero."""
    _, words, _, per_word = packed.shape
    padded = F.pad(weight, (0, words * per_word - weight.shape[1], 0, -weight.shape[0] % BLOCK))
    source = padded.view(-1, BLOCK, words, per_word).permute(0, 2, 1, 3)
    packed[rows.start // BLOCK :][: len(source)].copy_(source)


def _empty_blocks(shape: torch.Size, dtype: torch.dtype, weight_format: int) -> torch.Tensor:
    per_word = _INPUTS_PER_WORD[weight_format]
    return _empty_huge(torch.Size((-(-shape[0] // BLOCK), -(-shape[1] // per_word), BLOCK, per_word)), dtype)


def _empty_int4_blocks(shape: torch.Size) -> torch.Tensor:
    groups = -(-shape[1] // int4_linear.GROUP_SIZE)
    return _empty_huge(torch.Size((-(-shape[0] // BLOCK), groups, _INT4_BLOCK)), torch.uint8)


def _empty_huge(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized memory for weights, in huge pages where the system has them."""
    memory = torch.empty(shape, dtype=dtype)
    cpu_library.loaded().swarm_advise_huge(memory.data_ptr(), memory.nbytes)
    return memory


def _padded(values: torch.Tensor | None) -> torch.Tensor | None:
    """`[N]` -> fp32 `[N rounded up to 16]`."""
    return None if values is None else F.pad(values.float(), (0, -values.shape[0] % BLOCK)).contiguous()


def _describe(
    packed: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, shape: torch.Size, weight_format: int
) -> PackedLinear:
    outputs, inputs = shape
    pointers = (None if x is None else x.data_ptr() for x in (packed, scale, bias))
    return PackedLinear(
        packed, scale, bias, inputs, outputs, binding.LinearDesc(*pointers, inputs, outputs, weight_format)
    )
