"""The backend of the Triton kernels, which `selector` returns once they pass their self-test."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops.base.backend import AttentionBackend, LayerCache, LayerStack
from swarm_kernels.ops.base.layer_weights import LayerWeights
from swarm_kernels.ops.triton import attention
from swarm_kernels.ops.triton.attention import AttentionShape, SplitPlan
from swarm_kernels.ops.triton.graphs import TritonLayerStack
from swarm_kernels.ops.triton.layers import MAX_WIDTH, rms_norm, supports_stack


class TritonBackend(AttentionBackend):
    """fp32, bf16 and fp16, the dtypes that `selector` offers it for."""

    max_cached_stacks = 8  # each may hold the memory of CUDA graphs

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[AttentionMetadata, AttentionMetadata, SplitPlan] | None = (
            None  # every layer of a batch uses it
        )

    def supports_cache(self, k_blocks: torch.Tensor) -> bool:
        return True

    def supports_attention(
        self, heads: int, k_blocks: torch.Tensor, chunk: int | None = None, sinks: torch.Tensor | None = None
    ) -> bool:
        _, kv_heads, dim, _ = k_blocks.shape
        return (
            chunk is None and sinks is None and attention.supports(AttentionShape(heads, kv_heads, dim), k_blocks.dtype)
        )

    def supports_norm(self, x: torch.Tensor) -> bool:
        return x.shape[-1] <= MAX_WIDTH

    def supports_layers(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache], dtype: torch.dtype) -> bool:
        return supports_stack(layers, dtype) and all(k_blocks.dtype == dtype for k_blocks, _ in caches)

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
        assert chunk is None  # `supports_attention`
        assert sinks is None
        with _on(q):
            last = self._last
            shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2])
            tiling = attention.tiling_of(plan, shape, attention.wider_dtype(q.dtype, k_blocks.dtype))
            if last is None or last[0] is not plan or last[2].tiling != tiling:
                read = attention.kernel_metadata(plan)
                last = self._last = (plan, read, attention.cut(read, tiling))
            _, read, tiles = last
            attention.commit_tree_slots(k_blocks, v_blocks, read.copy_from, read.copy_to)
            attention.append(k, v, k_blocks, v_blocks, read.slot_mapping)
            return attention.attend_cached(q, k_blocks, v_blocks, read, tiles, scale, sliding_window, softcap)

    def commit_tree_slots(
        self, k_blocks: torch.Tensor, v_blocks: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor
    ) -> None:
        with _on(k_blocks):
            attention.commit_tree_slots(k_blocks, v_blocks, copy_from, copy_to)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        with _on(x):
            return rms_norm(x, weight, eps)

    def _prepare(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> LayerStack:
        return TritonLayerStack(layers, caches)


TRITON = TritonBackend()


def _on(tensor: torch.Tensor) -> torch.cuda.device:
    """Make the tensor's GPU current, since Triton launches on the current one. No effect for CPU tensors."""
    return torch.cuda.device(tensor.get_device())
