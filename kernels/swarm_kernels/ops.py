"""The kernels the rest of swarm calls, and which implementation answers. Torch in, torch out; knows no peers.

On the CPU, inside the lean span, the residual stream and all activations are fp32; only weights and KV pages have the
model's dtype. `native` chooses what runs on the CPU, `gpu` what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.errors import KernelError
from swarm_kernels import compiled, gpu, native, packed, quantised, quantised4, reference
from swarm_kernels.attention import attend, move_slots
from swarm_kernels.batch import BatchPlan
from swarm_kernels.checks import check_layer, check_plan, check_step
from swarm_kernels.native import available, describe, set_threads, use
from swarm_kernels.prepared import stack_of
from swarm_kernels.reference import LayerWeights, Linear, apply_rope

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
    "quantise_linear",
    "rms_norm",
    "set_threads",
    "use",
]


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Prepare a linear layer once. `weight [N, K]` bf16, fp32 or fp16 on any device, `bias [N]` or None.

    The result maps `x [n, K]` to `[n, N]` of x's dtype; a row's result does not depend on the other rows. Fused
    projections (QKV, gate-up) are concatenated by output before packing. The weight may be dropped afterwards. fp16 on
    the CPU is left to torch: a span there computes in bf16 or fp32.
    """
    _check_shapes(weight, bias)
    packable = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32)
    if packable and native.library() is not None:
        return packed.pack_linear(weight, bias)
    return reference.pack_linear(weight, bias)


def quantise_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, bits: int = 8) -> Linear:
    """Prepare a linear layer in 8 or 4 `bits`, see `quantised` and `quantised4`. `weight [N, K]` of any float dtype,
    best fp32, `bias [N]`.

    As `pack_linear` otherwise; a half and 5/16 of the memory of bf16 (on a GPU and where nothing is compiled, 4 bits
    take a little more than 8).
    """
    _check_shapes(weight, bias)
    if bits not in (4, 8):
        raise KernelError(f"a linear layer cannot be held in {bits} bits")
    if weight.device.type == "cpu" and native.library() is not None:
        return (packed.quantise_linear4 if bits == 4 else packed.quantise_linear)(weight, bias)
    return (quantised4.quantise_linear if bits == 4 else quantised.quantise_linear)(weight, bias)


def _check_shapes(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise KernelError(f"a linear layer of shape {tuple(weight.shape)} cannot be packed with this bias")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in fp32, in x's dtype."""
    library = native.library() if x.device.type == "cpu" and x.dtype == torch.float32 else None
    if library is not None:
        return compiled.rms_norm(library, x, weight, eps)
    kernels = gpu.kernels(x.device, x.dtype)
    if kernels is not None:
        return kernels.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


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
    library = native.library() if hidden.device.type == "cpu" and hidden.dtype == torch.float32 else None
    stack = stack_of(layers, caches) if library is not None and layers else None
    if library is not None and stack is not None:
        check_step(hidden, cos, sin, stack.width, stack.head_dim, plan)
        return compiled.decoder_layers(library, hidden, stack, cos, sin, plan)
    kernels = gpu.kernels(hidden.device, hidden.dtype, layers[0].head_dim) if layers else None
    on_gpu = kernels.stack_of(layers, caches, hidden.dtype) if kernels is not None else None
    if on_gpu is not None:
        check_step(hidden, cos, sin, on_gpu.width, on_gpu.head_dim, plan)
        check_plan(plan, on_gpu.pages)
        return on_gpu.run(hidden, layers, cos, sin, caches, plan)
    for weights, (k_pages, v_pages) in zip(layers, caches, strict=True):
        check_layer(weights, k_pages, v_pages)
        check_step(hidden, cos, sin, weights.o.out_features, weights.head_dim, plan)
        check_plan(plan, k_pages.shape[0])
    return reference.decoder_layers(hidden, layers, cos, sin, caches, plan)
