"""C descriptors of plans, caches and layer stacks for the compiled kernels.

Descriptors are validated when made, and cached, because making one can take longer than a short op. Caches and layers
are referenced weakly, so a cached descriptor keeps no tensor of theirs alive.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops.base.backend import LayerCache, LayerStack
from swarm_kernels.ops.base.layer_weights import LayerWeights, Linear, Mixture
from swarm_kernels.ops.base.split_experts import SplitExperts
from swarm_kernels.ops.cpu import binding, cpu_library
from swarm_kernels.ops.cpu.code_blocks import BLOCK
from swarm_kernels.ops.cpu.cpu_experts import describe_mixture, supports_mixture
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear, linear_desc

MAX_HEAD_DIM = 1024
_CACHE_DTYPES = (torch.bfloat16, torch.float32)
_MAX_CACHE_DESCS = 512  # descriptors cached; all are dropped when full

_caches: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], binding.CacheDesc]] = {}


def supports_attention(head_dim: int, state: torch.dtype) -> bool:
    """Whether attention is compiled for keys and values of this size and dtype: bf16 or fp32, a multiple of 16 up to
    1024."""
    return state in _CACHE_DTYPES and head_dim % BLOCK == 0 and head_dim <= MAX_HEAD_DIM


def supports_mlp(intermediate_size: int) -> bool:
    return intermediate_size % BLOCK == 0


def supports_cache(k_blocks: torch.Tensor) -> bool:
    """Whether the compiled attention takes these blocks."""
    return k_blocks.is_cpu and supports_attention(k_blocks.shape[2], k_blocks.dtype)


def supports_latent(k_blocks: torch.Tensor, value_dim: int) -> bool:
    """Whether the compiled attention takes these blocks, where the first `value_dim` numbers of a key are its value."""
    return supports_cache(k_blocks) and value_dim % BLOCK == 0


def describe_cache(k_blocks: torch.Tensor, v_blocks: torch.Tensor, latent: int = 0) -> binding.CacheDesc:
    """The C descriptor of a validated cache. Cached, since making one costs a tenth of a short context's attention.
    `latent`: if not 0, so many first numbers of a key are its value."""
    cached = _caches.get((id(k_blocks), latent))
    if cached is not None and cached[0]() is k_blocks and cached[1]() is v_blocks:
        return cached[2]
    if len(_caches) >= _MAX_CACHE_DESCS:
        _caches.clear()
    blocks, kv_heads, dim, _ = k_blocks.shape
    bf16 = k_blocks.dtype is torch.bfloat16
    sizes = (blocks, kv_heads, dim, v_blocks.shape[3])
    made = binding.CacheDesc(k_blocks.data_ptr(), v_blocks.data_ptr(), *sizes, bf16, latent)
    _caches[id(k_blocks), latent] = weakref.ref(k_blocks), weakref.ref(v_blocks), made
    return made


def supports_layer(weights: LayerWeights, k_blocks: torch.Tensor) -> bool:
    """Whether the linears are packed, the inner width of gated MLPs is a multiple of 16, and hidden states are rounded
    to bf16 or not at all."""
    attention, rounds = weights.attention, weights.rounding in (None, torch.bfloat16)
    if not (rounds and supports_cache(k_blocks) and _packed(attention.qkv, attention.o)):
        return False
    if isinstance(weights.mlp, Mixture):
        return supports_mixture(weights.mlp)
    return _packed(weights.mlp.gate_up, weights.mlp.down) and supports_mlp(weights.mlp.down.in_features)


def _packed(*linears: Linear) -> bool:
    return all(isinstance(linear, PackedLinear) for linear in linears)


def describe_scoring(
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> binding.ScoringDesc:
    """`sinks` contiguous fp32 and `chosen` contiguous int64 words, which the descriptor points into."""
    return binding.ScoringDesc(
        None if sinks is None else sinks.data_ptr(),
        None if chosen is None else chosen.data_ptr(),
        0 if chosen is None else chosen.shape[1],
        window or 0,
        chunk or 0,
        scale,
        softcap or 0.0,
    )


class CpuLayerStack(LayerStack):
    """Descriptors of layers and their caches; hidden states are fp32. All layers are one call, but for those whose
    experts are partly elsewhere: they are cut before and after their experts."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> None:
        super().__init__(layers, caches)
        self._library = library
        self._vectors: list[torch.Tensor] = []  # fp32; the layer descriptors point into them
        self._layers = [_describe_layer(weights, self._vectors) for weights in layers]
        self._caches = [describe_cache(k, v) for k, v in caches]
        self._runs = [self._run_of(run) for run in runs([is_split(weights) for weights in layers])]

    def _run_of(self, run: range) -> tuple[range, ctypes.Array[Any], ctypes.Array[binding.CacheDesc]]:
        """Layers that one call runs, and its arguments."""
        layers, caches = self._layers[run.start : run.stop], self._caches[run.start : run.stop]
        pointers = (ctypes.POINTER(binding.LayerDesc) * len(run))(*map(ctypes.pointer, layers))
        return run, pointers, (binding.CacheDesc * len(run))(*caches)

    def run(
        self,
        hidden: torch.Tensor,
        layers: Sequence[LayerWeights],
        cos: torch.Tensor,
        sin: torch.Tensor,
        caches: Sequence[LayerCache],
        plan: AttentionMetadata,
    ) -> torch.Tensor:
        out = hidden.clone(memory_format=torch.contiguous_format)
        fp32_cos, fp32_sin = cos.to(torch.float32).contiguous(), sin.to(torch.float32).contiguous()
        structure = prepared_plan(self._library, plan, self.blocks)
        tables = fp32_cos.data_ptr(), fp32_sin.data_ptr(), cos.shape[-1]
        for run, pointers, kv in self._runs:
            if is_split(layers[run.start]):
                self._run_split(run.start, layers[run.start], structure, tables, out)
                continue
            status = self._library.swarm_layers(pointers, kv, len(run), structure, *tables, out.data_ptr())
            cpu_library.check(status)
        return out

    def _run_split(
        self,
        place: int,
        weights: LayerWeights,
        plan: binding.PlanDesc,
        tables: tuple[int, int, int],
        out: torch.Tensor,
    ) -> None:
        """A layer whose experts Python calls, on `out [n, hidden]` in place."""
        assert isinstance(weights.mlp, Mixture)  # `is_split`
        chosen = weights.mlp.routing.chosen
        x, index = torch.empty_like(out), torch.empty(len(out), chosen, dtype=torch.int64)
        scores = torch.empty(len(out), chosen)
        status = self._library.swarm_layer_to_experts(
            self._layers[place], self._caches[place], plan, *tables,
            out.data_ptr(), x.data_ptr(), index.data_ptr(), scores.data_ptr(),
        )  # fmt: skip
        cpu_library.check(status)
        part = weights.mlp.experts(x, index, scores).contiguous()
        status = self._library.swarm_layer_from_experts(
            self._layers[place], x.data_ptr(), len(out), part.data_ptr(), out.data_ptr()
        )
        cpu_library.check(status)


def runs(split: Sequence[bool]) -> list[range]:
    """Places that run in one go, in order: a split layer by itself, the others as many as are neighbors."""
    found: list[range] = []
    for place, alone in enumerate(split):
        if alone or not found or split[found[-1].start]:
            found.append(range(place, place + 1))
        else:
            found[-1] = range(found[-1].start, place + 1)
    return found


def is_split(weights: LayerWeights) -> bool:
    """Whether some of its experts are elsewhere."""
    return isinstance(weights.mlp, Mixture) and isinstance(weights.mlp.experts, SplitExperts)


def _describe_layer(weights: LayerWeights, vectors: list[torch.Tensor]) -> binding.LayerDesc:
    """Appends to `vectors` the fp32 tensors that the descriptor points into."""

    def pointer(vector: torch.Tensor | None) -> int | None:
        if vector is None:
            return None
        vectors.append(vector.to(torch.float32).contiguous())
        return vectors[-1].data_ptr()

    a, mlp = weights.attention, weights.mlp
    plain = None if isinstance(mlp, Mixture) else mlp
    mixture = describe_mixture(mlp, vectors) if isinstance(mlp, Mixture) else None
    sinks = None if a.sinks is None else a.sinks.to(torch.float32).contiguous()
    if sinks is not None:
        vectors.append(sinks)
    return binding.LayerDesc(
        linear_desc(a.qkv),
        linear_desc(a.o),
        linear_desc(None if plain is None else plain.gate_up),
        linear_desc(None if plain is None else plain.down),
        None if mixture is None else ctypes.pointer(mixture),
        *map(pointer, weights.norms),
        pointer(a.q_norm),
        pointer(a.k_norm),
        describe_scoring(a.scale, a.window, a.softcap, a.chunk, sinks),
        a.heads,
        a.kv_heads,
        a.head_dim,
        a.norm_is_whole,
        -1 if a.rope is None else a.rope,
        0 if plain is None else plain.activation,
        weights.eps,
        weights.residual_scale,
        weights.rounding is not None,
    )


_PLAN_FIELDS = (
    ("positions", torch.int64),
    ("sequence_index", torch.int32),
    ("context_lens", torch.int32),
    ("slot_mapping", torch.int64),
    ("block_tables", torch.int32),
    ("tree_block_tables", torch.int32),
    ("tree_mask", torch.int64),
    ("copy_from", torch.int64),
    ("copy_to", torch.int64),
    ("tree_positions", torch.int32),
)


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedPlan:
    plan: AttentionMetadata
    blocks: int
    tensors: tuple[torch.Tensor, ...]  # contiguous; the structure points into them
    structure: binding.PlanDesc


_prepared: _PreparedPlan | None = None  # of the last plan: every layer of a batch uses it


def prepared_plan(library: ctypes.CDLL, plan: AttentionMetadata, blocks: int) -> binding.PlanDesc:
    """The plan's C descriptor, its slots validated against a cache of `blocks` blocks. Raises KernelError."""
    global _prepared
    last = _prepared
    if last is None or last.plan is not plan or last.blocks != blocks:
        tensors = tuple(getattr(plan, name).to(dtype).contiguous() for name, dtype in _PLAN_FIELDS)
        structure = binding.PlanDesc(
            plan.rows,
            plan.block_tables.shape[0],
            plan.block_tables.shape[1],
            plan.tree_block_tables.shape[1],
            plan.tree_mask.shape[1],
            plan.copy_from.shape[0],
            *(tensor.data_ptr() for tensor in tensors),
        )
        cpu_library.check(library.swarm_check_plan(structure, blocks))
        last = _prepared = _PreparedPlan(plan, blocks, tensors, structure)
    return last.structure
