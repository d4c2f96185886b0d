"""Random weights of codes of 4 and 8 bits, and the sums of the latter one by one."""

from __future__ import annotations

import torch

from swarm_kernels.ops.base import fp8_linear
from swarm_kernels.ops.base.codebook_linear import GROUP_SIZE, CodedWeights, CodeFormat, pairs_of
from swarm_kernels.ops.base.fp8_linear import Fp8Weights


def random_codes(form: CodeFormat, outputs: int, inputs: int, seed: int = 0) -> CodedWeights:
    """Every code, and scales of very different sizes and of either sign."""
    generator = torch.Generator().manual_seed(seed)
    groups = inputs // GROUP_SIZE
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    if form is CodeFormat.MXFP4:
        scale = torch.randint(110, 130, (outputs, groups), generator=generator, dtype=torch.uint8)
        return CodedWeights(form, pairs_of(codes), scale)
    each = GROUP_SIZE * groups // form.inputs
    scale = (torch.randn(outputs, each, generator=generator) * 0.01).half()
    if form is CodeFormat.NF4:
        return CodedWeights(form, pairs_of(codes), torch.rand(outputs, each, generator=generator) * 0.1)
    if form is CodeFormat.IQ4_NL:
        return CodedWeights(form, pairs_of(codes), scale)
    factor = torch.randint(-32, 32, (outputs, groups), generator=generator, dtype=torch.int8)
    return CodedWeights(form, pairs_of(codes), scale, factor)


def random_fp8(outputs: int, inputs: int, seed: int = 0) -> Fp8Weights:
    """Every code but those of NaN, and scales of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127]
    chosen = torch.randint(0, len(codes), (outputs, inputs), generator=generator)
    groups = -(-inputs // fp8_linear.GROUP_SIZE)
    return Fp8Weights(codes[chosen], torch.randn(outputs, groups, generator=generator).exp() * 0.01)


def summed_in_groups(weights: Fp8Weights, x: torch.Tensor) -> torch.Tensor:
    """Of each 128 inputs the sums of products, of each pair the second input first; then the groups in order."""
    numbers, x = weights.codes.view(torch.float8_e4m3fn).float(), x.bfloat16().float()
    total = torch.zeros(len(x), len(numbers))
    for group in range(weights.scale.shape[1]):
        end = min((group + 1) * fp8_linear.GROUP_SIZE, x.shape[1])
        sums = torch.zeros_like(total)
        for k in range(group * fp8_linear.GROUP_SIZE, end, 2):
            for i in (k + 1, k):
                sums = sums + x[:, i, None] * numbers[:, i]
        total = total + sums * weights.scale[:, group]
    return total
