"""The ops on the compiled CPU kernels: torch tensors in, torch tensors out, pointers in between.

Twins of `reference`'s functions for the cases that `covers_cache` and `covers_layer` admit; `reference` does the rest.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm.errors import KernelError
from swarm_kernels import native
from swarm_kernels.batch import BatchPlan
from swarm_kernels.cpu import binding
from swarm_kernels.reference import LayerWeights

BLOCK = 16
"""Outputs packed side by side."""
MAX_HEAD_DIM = 256
_STORED = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights in blocks of 16 outputs, the last padded: fp32 `[N/16, K, 16]`, bf16 `[N/16, K/2, 16, 2]`.

    Products and sums are fp32, in rising order of k in one chain, so a row's result is the same bit for bit alone and
    among others, on any number of threads.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None  # [N rounded up to 16] fp32
    in_features: int
    out_features: int
    desc: binding.Linear

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.device.type != "cpu":
            raise KernelError(f"a linear layer of {self.in_features} inputs was given {tuple(x.shape)} on {x.device}")
        wide = x.to(torch.float32).contiguous()
        out = torch.empty(x.shape[0], self.out_features)
        status = native.loaded().swarm_linear(self.desc, wide.data_ptr(), wide.shape[0], out.data_ptr())
        native.check(status)
        return out.to(x.dtype)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """See `ops.pack_linear`; `weight` on the CPU, bf16 or fp32."""
    outputs, inputs = weight.shape
    blocks = -(-outputs // BLOCK)
    if inputs % 2:  # bf16 weights are read in pairs of inputs
        weight = weight.float()
    padded = F.pad(weight, (0, 0, 0, blocks * BLOCK - outputs)) if outputs % BLOCK else weight
    if weight.dtype == torch.bfloat16:
        source = padded.view(blocks, BLOCK, inputs // 2, 2).permute(0, 2, 1, 3)
    else:
        source = padded.view(blocks, BLOCK, inputs).permute(0, 2, 1)
    packed = torch.empty(source.shape, dtype=weight.dtype)
    native.loaded().swarm_advise_huge(packed.data_ptr(), packed.nbytes)
    packed.copy_(source)
    if bias is not None:
        bias = F.pad(bias.float(), (0, blocks * BLOCK - outputs)).contiguous()
    desc = binding.Linear(
        packed.data_ptr(), _pointer(bias), inputs, outputs, weight.dtype == torch.bfloat16
    )
    return PackedLinear(packed, bias, inputs, outputs, desc)


def covers_cache(k_pages: torch.Tensor) -> bool:
    """Whether attention over these pages is compiled: CPU, bf16 or fp32, head size a multiple of 16 up to 256."""
    dim = k_pages.shape[2]
    return k_pages.device.type == "cpu" and k_pages.dtype in _STORED and dim % BLOCK == 0 and dim <= MAX_HEAD_DIM


def covers_layer(weights: LayerWeights) -> bool:
    """Whether a layer runs as one call: packed linears, whole blocks of 16 in the head and the MLP's inside."""
    linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
    packed = all(isinstance(linear, PackedLinear) for linear in linears)
    return packed and weights.head_dim % BLOCK == 0 and weights.down.in_features % BLOCK == 0


def attend(
    library: ctypes.CDLL,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See `ops.attend`."""
    queries, keys, values = (x.to(torch.float32).contiguous() for x in (q, k, v))
    out = torch.empty_like(queries)
    status = library.swarm_attend(
        queries.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        q.shape[1],
        _cache(k_pages, v_pages),
        prepared_plan(library, plan, k_pages.shape[0]),
        scale,
        sliding_window or 0,
        softcap or 0.0,
        out.data_ptr(),
    )
    native.check(status)
    return out.to(q.dtype)


def move_slots(
    library: ctypes.CDLL,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    copy_from: torch.Tensor,
    copy_to: torch.Tensor,
) -> None:
    """See `ops.move_slots`."""
    source, target = copy_from.contiguous(), copy_to.contiguous()
    status = library.swarm_move_slots(_cache(k_pages, v_pages), source.data_ptr(), target.data_ptr(), source.numel())
    native.check(status)


def rms_norm(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`; `x` fp32."""
    rows, scale = x.contiguous(), weight.to(torch.float32).contiguous()
    out = torch.empty_like(rows)
    width = rows.shape[-1]
    status = library.swarm_rms_norm(
        rows.data_ptr(), rows.numel() // width, width, scale.data_ptr(), eps, out.data_ptr()
    )
    native.check(status)
    return out


def decoder_layers(
    library: ctypes.CDLL,
    hidden: torch.Tensor,
    layers: Sequence[LayerWeights],
    cos: torch.Tensor,
    sin: torch.Tensor,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plan: BatchPlan,
) -> torch.Tensor:
    """See `ops.decoder_layers`; all layers covered, `hidden` fp32."""
    out = hidden.clone(memory_format=torch.contiguous_format)
    turn_cos, turn_sin = cos.to(torch.float32).contiguous(), sin.to(torch.float32).contiguous()
    count = len(layers)
    pointers = (ctypes.POINTER(binding.Layer) * count)(*(_layer(weights).pointer for weights in layers))
    pages = (binding.Cache * count)(*(_cache(k, v) for k, v in caches))
    status = library.swarm_layers(
        pointers,
        pages,
        count,
        prepared_plan(library, plan, min(k.shape[0] for k, _ in caches)),
        turn_cos.data_ptr(),
        turn_sin.data_ptr(),
        cos.shape[-1],
        out.data_ptr(),
    )
    native.check(status)
    return out


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _cache(k_pages: torch.Tensor, v_pages: torch.Tensor) -> binding.Cache:
    pages, groups, dim, _ = k_pages.shape
    return binding.Cache(
        k_pages.data_ptr(), v_pages.data_ptr(), pages, groups, dim, k_pages.dtype == torch.bfloat16
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    pointer: ctypes._Pointer[binding.Layer]
    norms: tuple[torch.Tensor | None, ...]  # fp32; the structure points into them


_layers: weakref.WeakKeyDictionary[LayerWeights, _Layer] = weakref.WeakKeyDictionary()


def _layer(weights: LayerWeights) -> _Layer:
    known = _layers.get(weights)
    if known is None:
        known = _layers[weights] = _describe_layer(weights)
    return known


def _describe_layer(weights: LayerWeights) -> _Layer:
    _check_layer_weights(weights)
    norms = tuple(
        None if norm is None else norm.to(torch.float32).contiguous()
        for norm in (weights.attn_norm, weights.mlp_norm, weights.q_norm, weights.k_norm)
    )
    linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
    structure = binding.Layer(
        *(linear.desc for linear in linears if isinstance(linear, PackedLinear)),
        *(_pointer(norm) for norm in norms),
        weights.heads,
        weights.kv_heads,
        weights.head_dim,
        weights.eps,
        weights.scale,
    )
    return _Layer(ctypes.pointer(structure), norms)


def _check_layer_weights(weights: LayerWeights) -> None:
    """A layer's linears and norms fit each other; looked at once a layer."""
    width, inner, dim = weights.o.out_features, weights.down.in_features, weights.head_dim
    attended = weights.heads * dim
    shapes = [(linear.in_features, linear.out_features) for linear in (weights.qkv, weights.o, weights.gate_up)]
    if shapes != [(width, attended + 2 * weights.kv_heads * dim), (attended, width), (width, 2 * inner)]:
        raise KernelError(f"the linear layers of a decoder layer do not fit each other: {shapes}")
    for norm, size in (
        (weights.attn_norm, width),
        (weights.mlp_norm, width),
        (weights.q_norm, dim),
        (weights.k_norm, dim),
    ):
        if norm is not None and norm.shape != (size,):
            raise KernelError(f"a norm of a decoder layer has shape {tuple(norm.shape)}, not {(size,)}")
    if weights.down.out_features != width:
        raise KernelError(f"the down projection gives {weights.down.out_features} values, not {width}")


_PLAN_FIELDS = (
    ("positions", torch.int64),
    ("session", torch.int32),
    ("past", torch.int32),
    ("write", torch.int64),
    ("pages", torch.int32),
    ("tree_pages", torch.int32),
    ("tree_mask", torch.int64),
    ("copy_from", torch.int64),
    ("copy_to", torch.int64),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    plan: BatchPlan
    pages: int
    tensors: tuple[torch.Tensor, ...]  # contiguous; the structure points into them
    structure: binding.Plan


_prepared: _Prepared | None = None  # the last: a batch asks once a layer


def prepared_plan(library: ctypes.CDLL, plan: BatchPlan, pages: int) -> binding.Plan:
    """The plan as the library takes it, checked against a cache of `pages` pages. Raises KernelError."""
    global _prepared
    known = _prepared
    if known is None or known.plan is not plan or known.pages != pages:
        tensors = tuple(getattr(plan, name).to(dtype).contiguous() for name, dtype in _PLAN_FIELDS)
        structure = binding.Plan(
            plan.rows,
            plan.pages.shape[0],
            plan.pages.shape[1],
            plan.tree_pages.shape[1],
            plan.tree_mask.shape[1],
            plan.copy_from.shape[0],
            *(tensor.data_ptr() for tensor in tensors),
        )
        native.check(library.swarm_check_plan(structure, pages))
        known = _prepared = _Prepared(plan, pages, tensors, structure)
    return known.structure
