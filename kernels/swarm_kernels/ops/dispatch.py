"""The ops that models call: validates the arguments once and dispatches to a backend.

Torch tensors in and out; knows no peers. `base.backend` defines each op, `cpu.cpu_library` selects the CPU backend,
`triton.selector` the GPU backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.errors import KernelError
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops.base import gated_norm, int4_linear, int8_linear, recurrence
from swarm_kernels.ops.base.backend import AttentionBackend, LayerCache
from swarm_kernels.ops.base.codebook_linear import CodebookLinear, CodedWeights
from swarm_kernels.ops.base.experts import Gating, PlainExperts, add_up, check_experts
from swarm_kernels.ops.base.fp8_linear import Fp8Linear, Fp8Weights
from swarm_kernels.ops.base.gated_norm import GatedNorm
from swarm_kernels.ops.base.head_linears import HeadLinears, PlainHeadLinears
from swarm_kernels.ops.base.layer_weights import (
    Attention,
    Experts,
    GatedMlp,
    LayerWeights,
    Linear,
    Mixture,
    plain_linear,
)
from swarm_kernels.ops.base.matrix import Matrix
from swarm_kernels.ops.base.recurrence import Convolution, Recurrence, State, StateRows
from swarm_kernels.ops.base.routing import Routing, Scores
from swarm_kernels.ops.base.split_experts import ExpertsElsewhere, SplitExperts
from swarm_kernels.ops.base.stored_weights import StoredWeights
from swarm_kernels.ops.base.torch_reference import REFERENCE, apply_rope
from swarm_kernels.ops.base.validate import (
    check_cache,
    check_plan,
    check_rows,
    check_slots,
    check_step,
    check_variant,
)
from swarm_kernels.ops.cpu import cpu_experts, cpu_head_linears, cpu_library, cpu_linear, cpu_recurrence
from swarm_kernels.ops.cpu.cpu_backend import cpu_backend
from swarm_kernels.ops.cpu.cpu_library import describe, isa, select_isa, set_threads
from swarm_kernels.ops.triton import selector

__all__ = [
    "Attention",
    "Convolution",
    "Experts",
    "GatedMlp",
    "GatedNorm",
    "Gating",
    "LayerWeights",
    "Linear",
    "Mixture",
    "Recurrence",
    "Routing",
    "Scores",
    "StateRows",
    "apply_rope",
    "attend",
    "attend_latent",
    "commit_tree_slots",
    "compiles_states",
    "convolve",
    "decoder_layer",
    "decoder_layers",
    "describe",
    "isa",
    "norm_gated",
    "pack_experts",
    "pack_head_linears",
    "pack_linear",
    "pack_stored",
    "quantize_linear",
    "recur",
    "rms_norm",
    "select_isa",
    "set_threads",
    "softplus",
    "split_experts",
]


def _backend(x: torch.Tensor, head_dim: int = selector.DEFAULT_HEAD_DIM) -> AttentionBackend:
    """The fastest backend for x's device; on a GPU, for its dtype and head size too."""
    library = cpu_library.library() if x.is_cpu else None
    if library is not None:
        return cpu_backend(library)
    return selector.backend(x.device, x.dtype, head_dim) or REFERENCE


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `AttentionBackend.attend`. Raises KernelError."""
    blocks, _, dim, _ = check_rows(q, k, v, k_blocks, v_blocks, plan)
    check_variant(q.shape[1], sliding_window, chunk, sinks)
    backend = _backend(q, dim)
    if not backend.supports_attention(q.shape[1], k_blocks, chunk, sinks):
        backend = REFERENCE
    if not backend.checks_slots:
        check_plan(plan, blocks)
    return backend.attend(q, k, v, k_blocks, v_blocks, plan, scale, sliding_window, softcap, chunk, sinks)


def attend_latent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
    scale: float,
    value_dim: int,
    softcap: float | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `AttentionBackend.attend_latent`. Raises KernelError."""
    if chosen is not None and (len(chosen) != plan.rows or 64 * chosen.shape[1] < int(plan.context_lens.max())):
        raise KernelError(f"{tuple(chosen.shape)} words choose no keys of {plan.rows} rows with these contexts")
    blocks, _, dim, _ = check_rows(q, k, v, k_blocks, v_blocks, plan, value_dim)
    backend = _backend(q, dim)
    if not backend.supports_latent(k_blocks, value_dim):
        backend = REFERENCE
    if not backend.checks_slots:
        check_plan(plan, blocks)
    return backend.attend_latent(q, k, v, k_blocks, v_blocks, plan, scale, value_dim, softcap, chosen)


def commit_tree_slots(
    k_blocks: torch.Tensor, v_blocks: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor
) -> None:
    """See `AttentionBackend.commit_tree_slots`. Raises KernelError."""
    blocks, _, dim, _ = check_cache(k_blocks, v_blocks)
    check_slots(copy_from, copy_to, blocks)
    backend = _backend(k_blocks, dim)
    even = v_blocks.shape[3] == dim
    if not (backend.supports_cache(k_blocks) if even else backend.supports_latent(k_blocks, dim)):
        backend = REFERENCE
    backend.commit_tree_slots(k_blocks, v_blocks, copy_from, copy_to)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `AttentionBackend.rms_norm`."""
    backend = _backend(x)
    return (backend if backend.supports_norm(x) else REFERENCE).rms_norm(x, weight, eps)


def decoder_layer(
    hidden: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
) -> torch.Tensor:
    """`decoder_layers` of one layer."""
    return decoder_layers(hidden, (weights,), cos, sin, ((k_blocks, v_blocks),), plan)


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerWeights],
    cos: torch.Tensor,
    sin: torch.Tensor,
    caches: Sequence[LayerCache],
    plan: AttentionMetadata,
) -> torch.Tensor:
    """See `LayerStack.run`. Raises KernelError.

    Prefer it to a loop: with the compiled library the stack is one call without the GIL, so a busy event loop delays a
    step once and not once per layer.
    """
    if not layers:
        return hidden
    backend = _backend(hidden, layers[0].attention.head_dim)
    stack = backend.layer_stack(layers, caches, hidden.dtype)
    if stack is None:
        backend, stack = REFERENCE, REFERENCE.layer_stack(layers, caches, hidden.dtype)
    assert stack is not None  # the reference backend supports every layer
    check_step(hidden, cos, sin, stack.width, stack.head_dim, stack.rotary_tables, plan)
    if not backend.checks_slots:
        check_plan(plan, stack.blocks)
    return stack.run(hidden, layers, cos, sin, caches, plan)


def compiles_states(x: torch.Tensor) -> bool:
    """Whether the ops below are compiled for such rows: elsewhere `convolve` and `recur` loop over single rows."""
    return x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and cpu_library.library() is not None


def convolve(
    x: torch.Tensor, how: Convolution, rows: StateRows, starts: Sequence[State]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`x [n, C]` fp32 or bf16 -> likewise, and the states `[C, taps]` after the rows that are saved. bf16: rounded
    before the activation and after it. Raises KernelError."""
    if compiles_states(x):
        return cpu_recurrence.convolve(x, how, rows, starts)
    return recurrence.convolve(x, how, rows, starts)


def recur(how: Recurrence, rows: StateRows, starts: Sequence[State]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """-> `[n, H, V]` fp32, and the states after the rows that are saved, fp32. Computed in fp32, row by row along each
    path. Raises KernelError."""
    if compiles_states(how.value):
        return cpu_recurrence.recur(how, rows, starts)
    return recurrence.recur(how, rows, starts)


def norm_gated(x: torch.Tensor, gate: torch.Tensor, how: GatedNorm) -> torch.Tensor:
    """`x` and `gate [n, groups * size]` fp32 or bf16 -> like x; computed in fp32. Raises KernelError."""
    if compiles_states(x):
        return cpu_recurrence.norm_gated(x, gate, how)
    return gated_norm.norm_gated(x, gate, how)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """`log(1 + e^x)`. A number's result does not depend on its place, as that of torch's vectors does."""
    return cpu_recurrence.softplus(x) if compiles_states(x) else torch.nn.functional.softplus(x)


def pack_linear(weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
    """Pack a linear layer once. `weight [N, K]` bf16, fp32 or fp16 on any device, `bias [N]` or None.

    The result maps `x [n, K]` to `[n, N]` of x's dtype and is batch-invariant: a row's result does not depend on the
    other rows. Fused projections (QKV, gate-up) are concatenated by output before packing. The weight may be freed
    afterwards; one that is read by parts never is in memory as a whole. fp16 on the CPU stays with torch: a span there
    computes in bf16 or fp32.
    """
    _check_shapes(weight, bias)
    packable = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32)
    if packable and cpu_library.library() is not None:
        return cpu_linear.pack_linear(weight, bias)
    return plain_linear(weight[:], bias)


def pack_head_linears(weight: torch.Tensor) -> HeadLinears:
    """A linear layer `[N, K]` of its own for each head: `weight [H, N, K]` of a float dtype on any device.

    Packed and batch-invariant where the compiled kernels take it; else torch's, and the weight is not copied."""
    if weight.dim() != 3:
        raise KernelError(f"linear layers of heads have no shape {tuple(weight.shape)}")
    if cpu_head_linears.supports(weight) and cpu_library.library() is not None:
        return cpu_head_linears.pack(weight)
    return PlainHeadLinears(weight)


def quantize_linear(weight: Matrix, bias: torch.Tensor | None = None, bits: int = 8) -> Linear:
    """Quantize a linear layer to 8 or 4 `bits`, see `int8_linear` and `int4_linear`. `weight [N, K]` of any float
    dtype, preferably fp32, `bias [N]`.

    As `pack_linear` otherwise; takes 1/2 and 5/16 of the memory of bf16 (in plain torch and on a GPU, 4 bits take
    slightly more than 8).
    """
    _check_shapes(weight, bias)
    if bits not in (4, 8):
        raise KernelError(f"a linear layer cannot be quantized to {bits} bits")
    if weight.device.type == "cpu" and cpu_library.library() is not None:
        return (cpu_linear.quantize_linear4 if bits == 4 else cpu_linear.quantize_linear)(weight, bias)
    return (int4_linear.quantize_linear if bits == 4 else int8_linear.quantize_linear)(weight, bias)


def pack_stored(weights: StoredWeights, bias: torch.Tensor | None, in_features: int) -> Linear:
    """A linear layer of weights as a checkpoint holds them, `bias [N]`. As `quantize_linear`, without rounding; codes
    take 17/64 of the memory of bf16 (MXFP4) or little more, E4M3 33/64, everywhere."""
    compiled = weights.device.type == "cpu" and cpu_library.library() is not None
    wide = None if bias is None else bias.float()
    if isinstance(weights, CodedWeights):
        return cpu_linear.pack_codes(weights, bias) if compiled else CodebookLinear(weights, wide)
    if isinstance(weights, Fp8Weights):
        return cpu_linear.pack_fp8(weights, bias) if compiled else Fp8Linear(weights, wide)
    if compiled:
        return cpu_linear.pack_four_bits(weights, bias, in_features)
    return int4_linear.Int4Linear(weights, wide, in_features)


def pack_experts(first: Sequence[Linear], second: Sequence[Linear], gating: Gating) -> Experts:
    """A mixture of experts of linear layers that the functions above prepared: `first[e]` hidden -> [gates; values],
    `second[e]` back. On a GPU and without compiled kernels plain torch runs one expert after another. Raises
    KernelError.
    """
    check_experts(first, second, gating)
    ups = [linear for linear in first if isinstance(linear, cpu_linear.PackedLinear)]
    downs = [linear for linear in second if isinstance(linear, cpu_linear.PackedLinear)]
    if len(ups) == len(first) and len(downs) == len(second):
        return cpu_experts.pack_experts(ups, downs, gating)
    return PlainExperts(first, second, gating)


def split_experts(
    own: Experts | None, held: range, count: int, hidden: int, layer: int, elsewhere: ExpertsElsewhere
) -> SplitExperts:
    """Experts `held` of the `count` of a layer, and the others wherever they are."""
    compiled = isinstance(own, cpu_experts.PackedExperts) or (own is None and cpu_library.library() is not None)
    return SplitExperts(own, held, count, hidden, layer, elsewhere, cpu_experts.add_up if compiled else add_up)


def _check_shapes(weight: Matrix, bias: torch.Tensor | None) -> None:
    if len(weight.shape) != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise KernelError(f"a linear layer of shape {tuple(weight.shape)} cannot be packed with this bias")
