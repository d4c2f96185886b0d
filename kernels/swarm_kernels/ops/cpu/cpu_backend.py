"""The backend of the compiled CPU kernels: torch tensors in and out, raw pointers at the C boundary."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops.base.backend import AttentionBackend, LayerCache, LayerStack
from swarm_kernels.ops.base.layer_weights import LayerWeights
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.ops.cpu.binding import CacheDesc, ScoringDesc
from swarm_kernels.ops.cpu.cpu_descriptors import (
    CpuLayerStack,
    describe_cache,
    describe_scoring,
    prepared_plan,
    supports_cache,
    supports_latent,
    supports_layer,
)


@cache
def cpu_backend(library: ctypes.CDLL) -> CpuBackend:
    """The backend of a loaded library, one per library."""
    return CpuBackend(library)


class CpuBackend(AttentionBackend):
    """Attention over bf16 and fp32 blocks; norms and stacks of packed layers in fp32."""

    checks_slots = True  # in C++, at a tenth of the time of `validate.check_plan`

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def supports_cache(self, k_blocks: torch.Tensor) -> bool:
        return supports_cache(k_blocks)

    def supports_latent(self, k_blocks: torch.Tensor, value_dim: int) -> bool:
        return supports_latent(k_blocks, value_dim)

    def supports_norm(self, x: torch.Tensor) -> bool:
        return x.dtype is torch.float32

    def supports_layers(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache], dtype: torch.dtype) -> bool:
        return dtype is torch.float32 and all(
            supports_layer(weights, k_blocks) for weights, (k_blocks, _) in zip(layers, caches, strict=True)
        )

    def attend(
        self,
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
        cache = describe_cache(k_blocks, v_blocks)
        sinks = None if sinks is None else _contiguous_fp32(sinks)
        scoring = describe_scoring(scale, sliding_window, softcap, chunk, sinks)
        return self._attend(q, k, v, cache, plan, scoring, cache.dim)

    def attend_latent(
        self,
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
        cache = describe_cache(k_blocks, v_blocks, value_dim)
        words = None if chosen is None else chosen.contiguous()
        return self._attend(q, k, v, cache, plan, describe_scoring(scale, softcap=softcap, chosen=words), value_dim)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: CacheDesc,
        plan: AttentionMetadata,
        scoring: ScoringDesc,
        value_dim: int,
    ) -> torch.Tensor:
        queries, keys, values = _contiguous_fp32(q), _contiguous_fp32(k), _contiguous_fp32(v)
        out = queries.new_empty(*q.shape[:2], value_dim)
        status = self._library.swarm_attend(
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            q.shape[1],
            cache,
            prepared_plan(self._library, plan, cache.blocks),
            scoring,
            out.data_ptr(),
        )
        if status:
            cpu_library.check(status)
        return out if out.dtype is q.dtype else out.to(q.dtype)

    def commit_tree_slots(
        self, k_blocks: torch.Tensor, v_blocks: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor
    ) -> None:
        source, target = copy_from.contiguous(), copy_to.contiguous()
        cache = describe_cache(k_blocks, v_blocks)
        status = self._library.swarm_commit_tree_slots(cache, source.data_ptr(), target.data_ptr(), source.numel())
        cpu_library.check(status)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, scale = x.contiguous(), weight.to(torch.float32).contiguous()
        out = torch.empty_like(rows)
        width = rows.shape[-1]
        status = self._library.swarm_rms_norm(
            rows.data_ptr(), rows.numel() // width, width, scale.data_ptr(), eps, out.data_ptr()
        )
        cpu_library.check(status)
        return out

    def _prepare(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> LayerStack:
        return CpuLayerStack(self._library, layers, caches)


def _contiguous_fp32(x: torch.Tensor) -> torch.Tensor:
    """`x` in contiguous fp32. The check comes first because a conversion without effect costs microseconds."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()
