"""What the compiled kernels are handed besides a batch's tensors: descriptions of plans, caches and stacks of layers.

Describing a stack takes longer than running some: descriptions are kept, and checked when they are made. They hold no
tensor alive that their owner has dropped.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels import native
from swarm_kernels.batch import BatchPlan
from swarm_kernels.checks import check_layer
from swarm_kernels.cpu import binding
from swarm_kernels.packed import BLOCK, PackedLinear
from swarm_kernels.reference import LayerWeights

MAX_HEAD_DIM = 256
_STORED = (torch.bfloat16, torch.float32)
_STACKS_KEPT = 16


def covers_cache(k_pages: torch.Tensor, dim: int) -> bool:
    """Whether attention over these pages is compiled: CPU, bf16 or fp32, head size a multiple of 16 up to 256."""
    return k_pages.is_cpu and k_pages.dtype in _STORED and dim % BLOCK == 0 and dim <= MAX_HEAD_DIM


def describe_cache(shape: torch.Size, k_pages: torch.Tensor, v_pages: torch.Tensor) -> binding.Cache:
    """A checked pair of pages, the keys of `shape`, as the library takes it."""
    pages, groups, dim, _ = shape
    bf16 = k_pages.dtype is torch.bfloat16
    return binding.Cache(k_pages.data_ptr(), v_pages.data_ptr(), pages, groups, dim, bf16)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Layers and their caches as the library takes them."""

    parts: tuple[weakref.ref[LayerWeights | torch.Tensor], ...]  # weights, keys, values of each layer
    layers: tuple[binding.Layer, ...]
    norms: tuple[torch.Tensor, ...]  # fp32; the layers point into them
    pointers: ctypes.Array[ctypes._Pointer[binding.Layer]]
    caches: ctypes.Array[binding.Cache]
    pages: int  # of the smallest cache
    width: int
    head_dim: int

    def is_of(self, parts: Sequence[LayerWeights | torch.Tensor]) -> bool:
        return len(parts) == len(self.parts) and all(ref() is part for ref, part in zip(self.parts, parts, strict=True))


_stacks: dict[tuple[int, ...], Stack] = {}


def stack_of(layers: Sequence[LayerWeights], caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Stack | None:
    """The stack's description, or None if a layer of it does not run as one call. Raises KernelError."""
    parts = [part for weights, cache in zip(layers, caches, strict=True) for part in (weights, *cache)]
    key = (id(parts[0]), id(parts[1]), id(parts[-1]), len(parts))
    known = _stacks.get(key)
    if known is not None and known.is_of(parts):
        return known
    if not all(_covers(weights, k_pages) for weights, (k_pages, _) in zip(layers, caches, strict=True)):
        return None
    while len(_stacks) >= _STACKS_KEPT:
        _stacks.pop(next(iter(_stacks)), None)
    made = _stacks[key] = _describe_stack(layers, caches, parts)
    return made


def _covers(weights: LayerWeights, k_pages: torch.Tensor) -> bool:
    """Packed linears, and whole blocks of 16 inside the MLP."""
    linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
    packed = all(isinstance(linear, PackedLinear) for linear in linears)
    return packed and weights.down.in_features % BLOCK == 0 and covers_cache(k_pages, weights.head_dim)


def _describe_stack(
    layers: Sequence[LayerWeights],
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    parts: Sequence[LayerWeights | torch.Tensor],
) -> Stack:
    width, head_dim = layers[0].o.out_features, layers[0].head_dim
    norms: list[torch.Tensor] = []
    structures = []
    for weights, (k_pages, v_pages) in zip(layers, caches, strict=True):
        check_layer(weights, k_pages, v_pages)
        if (weights.o.out_features, weights.head_dim) != (width, head_dim):
            raise KernelError("the layers of a stack differ in width or head size")
        structures.append(_describe_layer(weights, norms))
    count = len(structures)
    return Stack(
        parts=tuple(weakref.ref(part) for part in parts),
        layers=tuple(structures),
        norms=tuple(norms),
        pointers=(ctypes.POINTER(binding.Layer) * count)(*map(ctypes.pointer, structures)),
        caches=(binding.Cache * count)(*(describe_cache(k.shape, k, v) for k, v in caches)),
        pages=min(k_pages.shape[0] for k_pages, _ in caches),
        width=width,
        head_dim=head_dim,
    )


def _describe_layer(weights: LayerWeights, norms: list[torch.Tensor]) -> binding.Layer:
    """`norms` gets the tensors the description points into."""
    pointers = []
    for norm in (weights.attn_norm, weights.mlp_norm, weights.q_norm, weights.k_norm):
        if norm is not None:
            norms.append(norm.to(torch.float32).contiguous())
        pointers.append(None if norm is None else norms[-1].data_ptr())
    linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
    return binding.Layer(
        *(linear.desc for linear in linears if isinstance(linear, PackedLinear)),
        *pointers,
        weights.heads,
        weights.kv_heads,
        weights.head_dim,
        weights.eps,
        weights.scale,
    )


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
    """The plan as the library takes it, its slots checked against a cache of `pages` pages. Raises KernelError."""
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
