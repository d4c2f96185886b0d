"""Abstract attention backend: paged tree attention, commits of tree slots, RMS norm, stacks of decoder layers.

Owns the contract of the ops (shapes, dtypes, units) and the cache of layer stacks. Callers use `ops.dispatch`, which
validates the tensors and picks a backend by what it supports: `base.torch_reference` (plain torch), `cpu.cpu_backend`
(C++) or `triton.backend` (GPUs).

On the CPU, in the fast path, the residual stream and all activations are fp32; only weights and KV blocks have the
model's dtype, and hidden states are rounded to it after each layer.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops.base.layer_weights import LayerWeights
from swarm_kernels.ops.base.validate import check_stack

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Key blocks `[blocks, G, D, BLOCK_SIZE]` and value blocks `[blocks, G, BLOCK_SIZE, D]` of one layer."""


class LayerStack(ABC):
    """Decoder layers and their caches, validated and prepared for one backend. Keeps only weak references to them."""

    def __init__(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> None:
        """Raises KernelError if a layer does not fit its cache, or the layers each other."""
        check_stack(layers, caches)
        self.width, self.head_dim = layers[0].width, layers[0].attention.head_dim
        self.rotary_tables = 1 + max(weights.attention.rope or 0 for weights in layers)
        self.blocks = min(k_blocks.shape[0] for k_blocks, _ in caches)  # of the smallest cache
        self._parts = tuple(weakref.ref(part) for part in _parts(layers, caches))

    @property
    def alive(self) -> bool:
        """Whether all its layers and caches still exist."""
        return all(ref() is not None for ref in self._parts)

    def is_of(self, parts: Sequence[LayerWeights | torch.Tensor]) -> bool:
        """Whether it was made of exactly these layers and caches."""
        return len(parts) == len(self._parts) and all(
            ref() is part for ref, part in zip(self._parts, parts, strict=True)
        )

    @abstractmethod
    def run(
        self,
        hidden: torch.Tensor,
        layers: Sequence[LayerWeights],
        cos: torch.Tensor,
        sin: torch.Tensor,
        caches: Sequence[LayerCache],
        plan: AttentionMetadata,
    ) -> torch.Tensor:
        """`hidden [n, width]` through all layers, each with its own cache -> a new `[n, width]` of its dtype.

        `layers` and `caches` are those of the stack. `cos`, `sin` `[n, rot]` by Hugging Face's convention (both
        halves), rot <= head_dim; where layers rotate in different ways, `[tables, n, rot]`. Performs the plan's slot
        copies and appends each layer's keys and values, as `AttentionBackend.attend` does.
        """


class AttentionBackend(ABC):
    """One implementation of the ops. Arguments are validated (`base.validate`) and supported (`supports_*`)."""

    checks_slots: ClassVar[bool] = False
    """Whether it validates the plan's slots against the cache itself, once per plan, raising KernelError."""

    max_cached_stacks: ClassVar[int] = 16
    """Prepared layer stacks kept, least recently used evicted first: preparing one costs more than running it."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[object, ...], LayerStack] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def supports_cache(self, k_blocks: torch.Tensor) -> bool:
        """Whether `commit_tree_slots` works on blocks of this dtype and head size."""

    def supports_attention(
        self, heads: int, k_blocks: torch.Tensor, chunk: int | None = None, sinks: torch.Tensor | None = None
    ) -> bool:
        """Whether `attend` works with this many query heads over these blocks, with these arguments."""
        return self.supports_cache(k_blocks)

    def supports_latent(self, k_blocks: torch.Tensor, value_dim: int) -> bool:
        """Whether `attend_latent` works on these blocks, and `commit_tree_slots` where values are of another size than
        keys."""
        return False

    @abstractmethod
    def supports_norm(self, x: torch.Tensor) -> bool:
        """Whether `rms_norm` works on `x`."""

    @abstractmethod
    def supports_layers(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache], dtype: torch.dtype) -> bool:
        """Whether these layers run as one stack on hidden states of `dtype`."""

    @abstractmethod
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
        """Attention of packed rows over paged keys and values: `q [n, H, D]`, `k` and `v` `[n, G, D]` -> `[n, H, D]`.

        First the plan's slot copies are performed (`commit_tree_slots`; idempotent), then the rows' keys and values are
        written to their slots, then row i attends to the first `context_lens[i]` committed keys of its sequence and to
        the tree slots of its mask. Rows with no visible key get zeros. H is a multiple of G (grouped-query attention).

        `k_blocks [blocks, G, D, BLOCK_SIZE]` and `v_blocks [blocks, G, BLOCK_SIZE, D]` change in place. Scores are
        multiplied by `scale`; `sliding_window` masks keys, tree slots too, at distance >= window tokens from the row's
        position, `chunk` those of earlier chunks of so many positions (at most one of the two is given); `softcap` is
        Gemma's cap * tanh(score / cap); `sinks [H]` fp32 are one more score per head, with no value. `q` has any float
        dtype, which is the result's.
        Compiled backends compute the dense context and the sparse tree separately and merge them by online softmax
        (Ghidorah, section III-B), so no mask over the context is built.
        """

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
        """`attend` where the value of a token is the first `value_dim` numbers of its key: `q [n, H, D]`, `k [n, G, D]`
        -> `[n, H, value_dim]` (multi-head latent attention, DeepSeek V2, section 2.1, with absorbed projections: G is
        1, D is 576 and `value_dim` 512 there).

        `v [n, G, any]` and `v_blocks` are written and not read; usually of size 0. `chosen [n, words]` int64: row i
        sees those of its committed keys alone whose bit is set (bit j of word w: key 64 * w + j); rows are as long as
        the longest context needs. Only where `supports_latent`."""
        raise NotImplementedError

    @abstractmethod
    def commit_tree_slots(
        self, k_blocks: torch.Tensor, v_blocks: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor
    ) -> None:
        """Commit tree slots of one layer: copy keys and values at flat slots `copy_from [m]` to `copy_to [m]` (int64),
        in place; all are read before any is written."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / rms(x) * weight` over the last dimension, computed in fp32, in x's dtype; `x [..., width]`, `weight
        [width]`."""

    @abstractmethod
    def _prepare(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> LayerStack:
        """Prepare a stack of supported layers."""

    def layer_stack(
        self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache], dtype: torch.dtype
    ) -> LayerStack | None:
        """These layers as a stack for hidden states of `dtype`, or None if that is not supported. Raises KernelError.

        Prepared and validated once, because that takes longer than running a short stack; cached while its layers and
        caches live, at most `max_cached_stacks`, evicting the least recently used.
        """
        parts = _parts(layers, caches)
        key = (id(parts[0]), id(parts[1]), id(parts[-1]), len(parts), dtype)
        with self._lock:
            cached = self._stacks.pop(key, None)
            if cached is None or not cached.is_of(parts):
                if not self.supports_layers(layers, caches, dtype):
                    return None
                for stale in [other for other, stack in self._stacks.items() if not stack.alive]:
                    del self._stacks[stale]  # it may hold the memory of CUDA graphs
                while len(self._stacks) >= self.max_cached_stacks:
                    del self._stacks[next(iter(self._stacks))]
                cached = self._prepare(layers, caches)
            self._stacks[key] = cached
            return cached


def _parts(layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> list[LayerWeights | torch.Tensor]:
    return [part for weights, cache in zip(layers, caches, strict=True) for part in (weights, *cache)]
