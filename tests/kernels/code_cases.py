"""Random weights of 4-bit codes, and the bytes that GGUF files and checkpoints hold of them."""

from __future__ import annotations

import torch

from swarm_kernels.ops.base.codebook_linear import GROUP_SIZE, CodedWeights, CodeFormat, pairs_of


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
    if form is CodeFormat.IQ4_NL:
        return CodedWeights(form, pairs_of(codes), scale)
    factor = torch.randint(-32, 32, (outputs, groups), generator=generator, dtype=torch.int8)
    return CodedWeights(form, pairs_of(codes), scale, factor)
