"""Linear layers of 4-bit codes: MXFP4, bitsandbytes' NF4, and GGUF's IQ4_NL and IQ4_XS, computed from what their
files hold.

A code stands for one of 16 whole numbers, and 32 inputs of an output share a scale, of NF4 64. Activations are
quantized to int8 as in `int8_linear`; integer sums are exact and the float operations are rounded one by one in
ascending order of k, so results are batch-invariant and bit for bit the same on every backend.

The numbers of NF4 are no whole ones: in products they are multiples of 1/112, which errs by 0.0017 of a group's largest
weight (root mean square), where NF4 itself errs by 0.036.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.int8_linear import ACTIVATION_GROUP_SIZE, quantize_rows
from swarm_kernels.ops.base.layer_weights import OfCodes
from swarm_kernels.ops.base.matrix import CHUNK_WEIGHTS, Matrix

GROUP_SIZE = 32
"""Inputs of an output that share a scale."""

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # of E2M1: twice 0, 0.5, 1, 1.5, 2, 3, 4 and 6
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_NF4_LARGEST = (
    112  # no other whole number up to 127 makes the 16 err as little: 0.0017 of the largest, root mean square
)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_BIAS, _LARGEST_EXPONENT = 127, 239  # E8M0; beyond it, sums of products may exceed fp32
_E2M1_EXPONENT, _E2M1_LARGEST = 2, 6.0  # of its largest number


class CodeFormat(Enum):
    """MXFP4: OCP Microscaling Formats 1.0. NF4: appendix E of arXiv 2305.14314. The others: ggml-common.h of
    https://github.com/ggml-org/llama.cpp."""

    MXFP4 = "mxfp4"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    NF4 = "nf4"

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the codes 0 to 15 stand for in products; in MXFP4, twice that, and in NF4, 112 times that, rounded."""
        if self is CodeFormat.MXFP4:
            return (*_HALVES, *(-number for number in _HALVES))
        return tuple(round(_NF4_LARGEST * number) for number in _NF4) if self is CodeFormat.NF4 else _IQ4

    @property
    def values(self) -> tuple[float, ...]:
        """What the codes stand for: the numbers themselves, where these are whole."""
        if self is CodeFormat.MXFP4:
            return tuple(number / 2 for number in self.numbers)
        return _NF4 if self is CodeFormat.NF4 else self.numbers

    @property
    def inputs(self) -> int:
        """A row's are a multiple of these."""
        return {CodeFormat.IQ4_XS: 8, CodeFormat.NF4: 2}.get(self, 1) * GROUP_SIZE


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeights:
    """Weight `[n, k]` is the number of its code times the scale of group `k // GROUP_SIZE` of row n.

    `pairs`: byte 4 q + i of a group holds the codes of inputs 8 q + i, in the low half, and 8 q + 4 + i.
    `scale`: IQ4_NL's `[N, groups]` in fp16; MXFP4's `[N, groups]` powers of two as uint8 (E8M0); of IQ4_XS, fp16
    `[N, groups / 8]`, times `factor [N, groups]` int8; of NF4, fp32 `[N, groups / 2]`, the largest weight of each 64.
    """

    form: CodeFormat
    pairs: torch.Tensor  # [N, groups, 16] uint8
    scale: torch.Tensor
    factor: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.pairs.shape[0]

    @property
    def padded_inputs(self) -> int:
        """As many as there are: they are whole groups."""
        return self.pairs.shape[1] * GROUP_SIZE

    @property
    def device(self) -> torch.device:
        return self.pairs.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.pairs, self.scale, self.factor) if tensor is not None)

    def to(self, device: torch.device) -> CodedWeights:
        factor = None if self.factor is None else self.factor.to(device)
        return CodedWeights(self.form, self.pairs.to(device), self.scale.to(device), factor)

    def rows(self, index: torch.Tensor | slice) -> CodedWeights:
        """Of these outputs."""
        factor = None if self.factor is None else self.factor[index]
        return CodedWeights(self.form, self.pairs[index], self.scale[index], factor)

    def group_numbers(self, group: int | slice = slice(None)) -> torch.Tensor:
        """The whole numbers of some groups, `[N, inputs]` fp32."""
        table = torch.tensor(self.form.numbers, dtype=torch.float32, device=self.device)
        return table[codes_of(self.pairs[:, group]).int()]

    def scales(self) -> torch.Tensor:
        """`[N, groups]` fp32, of `numbers`: in MXFP4 half of what is stored, in NF4 a 112th, rounded."""
        if self.form is CodeFormat.MXFP4:
            return _power_of_two(self.scale) * 0.5
        if self.form is CodeFormat.NF4:
            return (self.scale * (1 / _NF4_LARGEST)).repeat_interleave(2, 1)
        if self.factor is None:
            return self.scale.float()
        return self.scale.float().repeat_interleave(8, 1) * self.factor

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """`[m]` ids of outputs -> their weights in fp32, `[m, padded_inputs]`: what they stand for, to the last bit."""
        some = self.rows(ids)
        if self.form is CodeFormat.NF4:
            table = torch.tensor(self.form.values, device=self.device)
            return table[codes_of(some.pairs).int()] * some.scale.repeat_interleave(2 * GROUP_SIZE, 1)
        return some.group_numbers() * some.scales().repeat_interleave(GROUP_SIZE, 1)

    @staticmethod
    def stacked(parts: Sequence[CodedWeights]) -> CodedWeights | None:
        """The outputs of all parts, one after another; None if they are not of one format."""
        first = parts[0]
        if any(part.form != first.form for part in parts):
            return None
        if len(parts) == 1:
            return first
        factors = [part.factor for part in parts if part.factor is not None]
        return CodedWeights(
            first.form,
            torch.cat([part.pairs for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(factors) if factors else None,
        )


def pairs_of(codes: torch.Tensor) -> torch.Tensor:
    """`[..., groups * GROUP_SIZE]` uint8 codes -> `CodedWeights.pairs`."""
    quads = codes.reshape(*codes.shape[:-1], -1, 4, 2, 4)  # group, pair of quads, quad, input
    return (quads[..., 0, :] | quads[..., 1, :] << 4).flatten(-2)


def codes_of(pairs: torch.Tensor) -> torch.Tensor:
    """The inverse of `pairs_of`: `[N, 16]` or `[N, groups, 16]` -> `[N, inputs]` uint8."""
    quads = pairs.reshape(*pairs.shape[:-1], 4, 4)
    return torch.stack((quads & 15, quads >> 4), -2).flatten(1)


def is_nf4(table: torch.Tensor) -> bool:
    """Whether these are what the codes 0 to 15 of NF4 stand for."""
    return torch.equal(table.float().cpu(), torch.tensor(_NF4))


def nf4_codes(weights: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest of NF4's numbers, for weights from -1 to 1 of any shape."""
    numbers = torch.tensor(_NF4, dtype=torch.float32, device=weights.device)
    return torch.bucketize(weights, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)


def coded_weights(
    form: CodeFormat, pairs: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None = None
) -> CodedWeights | None:
    """None where a scale is no number, or one of MXFP4 above 2^112."""
    finite = (scale <= _LARGEST_EXPONENT).all() if form is CodeFormat.MXFP4 else scale.isfinite().all()
    return CodedWeights(form, pairs, scale, factor) if finite else None


def _power_of_two(stored: torch.Tensor) -> torch.Tensor:
    """uint8 as E8M0 -> fp32, exactly; 255, which is no number, as infinity."""
    bits = stored.int()
    return (bits << 23 | (bits == 0).int() << 22).view(torch.float32)  # 2^-127 is subnormal


def quantize_mxfp4(weight: Matrix) -> CodedWeights:
    """`[N, K]` of any float dtype, K a multiple of `GROUP_SIZE`, by section 6.3 of OCP Microscaling Formats 1.0: the
    largest number's power of two, less E2M1's, is the scale. Raises KernelError."""
    outputs, inputs = weight.shape
    if inputs % GROUP_SIZE:
        raise KernelError(f"a linear layer of {inputs} inputs is no MXFP4: they are no multiple of {GROUP_SIZE}")
    groups = inputs // GROUP_SIZE
    pairs = torch.empty(outputs, groups, GROUP_SIZE // 2, dtype=torch.uint8, device=weight.device)
    exponents = torch.empty(outputs, groups, dtype=torch.uint8, device=weight.device)
    step = max(1, CHUNK_WEIGHTS // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        pairs[rows], exponents[rows] = _quantize_mxfp4(weight[rows].float().reshape(-1, groups, GROUP_SIZE))
    return CodedWeights(CodeFormat.MXFP4, pairs, exponents)


def _quantize_mxfp4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    peak = groups.abs().amax(2)
    if not peak.isfinite().all():
        raise KernelError("weights that are not finite cannot be quantized to 4 bits")
    exponent = torch.frexp(peak).exponent - 1 - _E2M1_EXPONENT  # peak is below 2^frexp
    stored = torch.where(peak == 0, 0, exponent.clamp(-_BIAS, _BIAS) + _BIAS).to(torch.uint8)
    scaled = groups.abs().div_(_power_of_two(stored)[..., None]).clamp_(max=_E2M1_LARGEST)
    numbers = torch.tensor(_HALVES, dtype=torch.float32, device=groups.device) / 2
    between = (numbers[1:] + numbers[:-1]) / 2
    above = torch.bucketize(scaled, between)  # ties go down here, and below to the even code
    ties = scaled == torch.cat((between, between.new_tensor([torch.inf])))[above]
    codes = above + (ties & (above % 2 == 1)) + 8 * groups.signbit()
    return pairs_of(codes.to(torch.uint8).flatten(1)), stored


@dataclass(frozen=True, slots=True, eq=False)
class CodebookLinear(OfCodes):
    """See `layer_weights.Linear`; any device. The compiled kernels give bit-identical results."""

    weights: CodedWeights
    bias: torch.Tensor | None  # [N] fp32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        groups, row_scales = quantize_rows(x)
        quantized, scales = groups.flatten(1), self.weights.scales()
        total = torch.zeros(x.shape[0], self.out_features, device=x.device)
        for group in range(scales.shape[1]):
            part = quantized[:, group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
            sums = part @ self.weights.group_numbers(group).T  # below 2^24: exact in fp32 in any order
            total += sums * scales[:, group] * row_scales[:, group * GROUP_SIZE // ACTIVATION_GROUP_SIZE, None]
        return (total if self.bias is None else total + self.bias).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights.embedding_rows(ids)
