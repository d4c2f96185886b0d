"""Linear layers with their weights packed for the compiled CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import KernelError
from swarm_kernels.ops.base import int4_linear, int8_linear
from swarm_kernels.ops.cpu import binding, cpu_library

BLOCK = 16
"""Outputs packed side by side."""

_TOGETHER = {binding.FP32: 1, binding.BF16: 2, binding.INT8: 4}
"""Inputs of one output that lie side by side."""

_OFFSET = 128
"""Added to 8-bit weights: the dot-product instructions take them unsigned."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights in blocks of 16 outputs, the last padded: fp32 `[N/16, K, 16, 1]`, bf16 `[N/16, K/2, 16, 2]`, int8
    `[N/16, K/4, 16, 4]`, int4 `[N/16, K/32, 320]` (see `_four_bit_blocks`).

    Products and sums are fp32, in rising order of k in one chain (bf16, whose inputs are rounded to bf16 too: of each
    pair the second first), or of whole numbers (see `quantized` and `quantised4`), so a row's result is the same bit
    for bit alone and among others, on any number of threads.
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
            return _four_bit_rows(self.packed, ids)[:, : self.in_features]
        weights = self.packed[ids // BLOCK, :, ids % BLOCK].flatten(1)[:, : self.in_features]
        if self.scale is None:
            return weights
        return (weights.float() - _OFFSET) * self.scale[ids, None]


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """See `ops.pack_linear`; `weight` on the CPU, bf16 or fp32."""
    if weight.shape[1] % 2:  # bf16 weights are read in pairs of inputs
        weight = weight.float()
    return _pack(weight, None, bias, binding.BF16 if weight.dtype == torch.bfloat16 else binding.FP32)


def quantize_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """See `ops.quantise_linear`; `weight` on the CPU."""
    numbers, scale = int8_linear.quantize_weight(weight)
    raised = (numbers.view(torch.uint8) ^ _OFFSET).contiguous()  # of an int8: plus 128
    return _pack(raised, scale, bias, binding.INT8)


def quantize_linear4(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """See `ops.quantise_linear`; `weight` on the CPU."""
    blocks = _four_bit_blocks(int4_linear.quantize_weight(weight))
    packed = _roomy(blocks.shape, torch.uint8).copy_(blocks)
    return _describe(packed, None, _padded(bias), weight.shape, binding.INT4)


def _four_bit_blocks(weights: int4_linear.FourBitWeights) -> torch.Tensor:
    """cpu/int4.h's FourBits, `[N/16, K/32, 320]` bytes: 16 scales, 16 minima, then 4 x 16 x 4 pairs of numbers.

    Of the 8 quads of an output's 32 numbers, the even ones are the low halves of the bytes, the odd ones the high.
    """
    padding = -weights.numbers.shape[0] % BLOCK
    numbers, scale, least = (F.pad(x, (0, 0, 0, padding)) for x in (weights.numbers, weights.scale, weights.minimum))
    quads = numbers.view(-1, BLOCK, scale.shape[1], 4, 2, 4)  # [block, output, share, pair, of the pair, input]
    pairs = (quads[..., 0, :] | quads[..., 1, :] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    heads = torch.stack((scale, least)).view(2, -1, BLOCK, scale.shape[1]).permute(1, 3, 0, 2)
    return torch.cat((heads.flatten(2).contiguous().view(torch.uint8), pairs), 2)


def _four_bit_rows(packed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[m]` ids of outputs -> their weights in fp32, padded: the inverse of `_four_bit_blocks`."""
    blocks, lane, each = packed[ids // BLOCK], ids % BLOCK, torch.arange(len(ids))
    count, shares, _ = blocks.shape
    heads = blocks[..., : 4 * BLOCK].contiguous().view(torch.float16).view(count, shares, 2, BLOCK)[each, ..., lane]
    pairs = blocks[..., 4 * BLOCK :].reshape(count, shares, 4, BLOCK, 4)[each, :, :, lane]  # [m, K/32, 4, 4]
    numbers = torch.stack((pairs & 15, pairs >> 4), 3).flatten(2)
    return (numbers * heads[..., :1].float() + heads[..., 1:].float()).flatten(1)


def _pack(weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, form: int) -> PackedLinear:
    """`weight [N, K]`, `scale` and `bias` `[N]`. What pads int8 weights is multiplied by padding."""
    together = _TOGETHER[form]
    padded = F.pad(weight, (0, -weight.shape[1] % together, 0, -weight.shape[0] % BLOCK))
    source = padded.view(-1, BLOCK, padded.shape[1] // together, together).permute(0, 2, 1, 3)
    packed = _roomy(source.shape, weight.dtype).copy_(source)
    return _describe(packed, _padded(scale), _padded(bias), weight.shape, form)


def _roomy(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory for weights, in huge blocks where the system has them."""
    memory = torch.empty(shape, dtype=dtype)
    cpu_library.loaded().swarm_advise_huge(memory.data_ptr(), memory.nbytes)
    return memory


def _padded(values: torch.Tensor | None) -> torch.Tensor | None:
    """`[N]` -> fp32 `[N rounded up to 16]`."""
    return None if values is None else F.pad(values.float(), (0, -values.shape[0] % BLOCK)).contiguous()


def _describe(
    packed: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, shape: torch.Size, form: int
) -> PackedLinear:
    outputs, inputs = shape
    pointers = (None if x is None else x.data_ptr() for x in (packed, scale, bias))
    return PackedLinear(packed, scale, bias, inputs, outputs, binding.LinearDesc(*pointers, inputs, outputs, form))
