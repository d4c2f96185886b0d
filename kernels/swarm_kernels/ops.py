"""The kernels the rest of swarm calls, and which implementation answers. Torch in, torch out; knows no peers.

On the CPU, inside the lean span, the residual stream and all activations are fp32; only weights and KV pages have the
model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm_kernels import reference
from swarm_kernels.attention import attend, move_slots
from swarm_kernels.batch import BatchPlan
from swarm_kernels.reference import LayerWeights, Linear, apply_rope, rms_norm

__all__ = [
    "LayerWeights",
    "Linear",
    "apply_rope",
    "attend",
    "available",
    "decoder_layer",
    "decoder_layers",
    "describe",
    "move_slots",
    "pack_linear",
    "rms_norm",
    "set_threads",
]


def available() -> str:
    """The CPU implementation in use: "avx512", "avx2", "generic" (compiled) or "reference" (plain torch)."""
    return "reference"


def describe() -> str:
    """`available()` in words, with the reason, for a program to show."""
    return "plain torch"


def set_threads(count: int) -> None:
    """How many threads an op may use, the caller included."""
    torch.set_num_threads(count)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Prepare a linear layer once. `weight [N, K]` bf16, fp32 or fp16 on any device, `bias [N]` or None.

    The result maps `x [n, K]` to `[n, N]` of x's dtype; a row's result does not depend on the other rows. Fused
    projections (QKV, gate-up) are concatenated by output before packing. The weight may be dropped afterwards.
    """
    return reference.pack_linear(weight, bias)


def decoder_layer(
    hidden: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: BatchPlan,
) -> torch.Tensor:
    """One whole layer: `hidden [n, hidden]` -> a new `[n, hidden]`.

    `cos`, `sin` `[n, rot]` by Hugging Face's convention (both halves), rot <= head_dim. Carries out the plan's slot
    copies and appends this layer's keys and values, as `attend` does.
    """
    return decoder_layers(hidden, (weights,), cos, sin, ((k_pages, v_pages),), plan)


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerWeights],
    cos: torch.Tensor,
    sin: torch.Tensor,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plan: BatchPlan,
) -> torch.Tensor:
    """`decoder_layer` through a stack of layers, each with its own (k_pages, v_pages).

    Prefer it to a loop: compiled, the stack is one call that holds no GIL from beginning to end, so a busy event loop
    delays a step once instead of once a layer.
    """
    return reference.decoder_layers(hidden, layers, cos, sin, caches, plan)
