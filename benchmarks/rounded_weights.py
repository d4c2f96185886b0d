"""Rounds matrices to fp8 and NF4 as those who release such checkpoints do."""

from __future__ import annotations

import torch

from swarm_kernels.ops.base.codebook_linear import CodedWeights, CodeFormat, nf4_codes, pairs_of
from swarm_kernels.ops.base.fp8_linear import GROUP_SIZE, Fp8Weights

_LARGEST = 448  # of E4M3


def to_fp8(weight: torch.Tensor) -> Fp8Weights:
    """`[N, K]` fp32: blocks of 128 x 128, each scaled to its largest weight (DeepSeek-V3, arXiv 2412.19437)."""
    outputs, inputs = weight.shape
    size = weight.abs()
    across = torch.stack([size[:, k : k + GROUP_SIZE].amax(1) for k in range(0, inputs, GROUP_SIZE)], 1)
    down = torch.stack([across[n : n + GROUP_SIZE].amax(0) for n in range(0, outputs, GROUP_SIZE)])
    scale = (down / _LARGEST).repeat_interleave(GROUP_SIZE, 0)[:outputs].contiguous()
    wide = scale.repeat_interleave(GROUP_SIZE, 1)[:, :inputs]
    codes = (weight / wide.clamp_min(1e-30)).to(torch.float8_e4m3fn)
    return Fp8Weights(codes.view(torch.uint8), scale)


def to_nf4(weight: torch.Tensor) -> CodedWeights:
    """`[N, K]` fp32, K a multiple of 64: each 64 scaled to their largest (QLoRA, arXiv 2305.14314)."""
    groups = weight.view(len(weight), -1, CodeFormat.NF4.inputs)
    scale = groups.abs().amax(2)
    codes = nf4_codes(groups / scale.clamp_min(1e-30)[..., None]).flatten(1)
    return CodedWeights(CodeFormat.NF4, pairs_of(codes), scale)
