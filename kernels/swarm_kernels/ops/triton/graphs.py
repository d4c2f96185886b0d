"""CUDA graphs over stacks of decoder layers: a step of a few rows is one launch instead of hundreds.

Owns which batch sizes are captured, when, and how many graphs are cached. It captures `layers.decoder_layers` on a
`PaddedBatch`; the arithmetic is the same as in eager mode.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops.base.backend import LayerCache, LayerStack
from swarm_kernels.ops.base.layer_weights import LayerWeights
from swarm_kernels.ops.triton.attention import processors
from swarm_kernels.ops.triton.layers import attention_shape, decoder_layers
from swarm_kernels.ops.triton.padded_batch import PaddedBatch, Size

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as _PoolHandle

logger = logging.getLogger(__name__)

_MAX_GRAPHS = 32  # cached per stack, least recently used evicted: each holds device memory


class _Graph:
    """One captured step. It reads the KV blocks and weights at the addresses they had at capture."""

    def __init__(
        self, batch: PaddedBatch, layers: Sequence[LayerWeights], caches: Sequence[LayerCache], pool: _PoolHandle
    ) -> None:
        """Capture while `batch` is all padding, so that the warm-up run leaves the cache alone. Raises RuntimeError."""
        self.batch = batch
        self._graph = torch.cuda.CUDAGraph()
        tiling = batch.size.tiling
        side = torch.cuda.Stream(batch.hidden.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up: compiles kernels and allocates the cuBLAS workspace
            decoder_layers(batch.hidden, layers, batch.cos, batch.sin, caches, batch.plan, tiling)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            self._out = decoder_layers(batch.hidden, layers, batch.cos, batch.sin, caches, batch.plan, tiling)

    def run(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionMetadata) -> torch.Tensor:
        self.batch.load(hidden, cos, sin, plan)
        self._graph.replay()
        return self._out[: hidden.shape[0]].clone()


class TritonLayerStack(LayerStack):
    """A stack on the GPU and its captured graphs."""

    def __init__(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> None:
        super().__init__(layers, caches)
        self._graphs: OrderedDict[Size, _Graph] = OrderedDict()
        self._seen: set[Size] = set()
        self._pool: _PoolHandle | None = None
        self._eager = False  # set once a capture has failed

    def run(
        self,
        hidden: torch.Tensor,
        layers: Sequence[LayerWeights],
        cos: torch.Tensor,
        sin: torch.Tensor,
        caches: Sequence[LayerCache],
        plan: AttentionMetadata,
    ) -> torch.Tensor:
        """See `LayerStack.run`. A batch size is captured at its second use."""
        with torch.cuda.device(hidden.get_device()):
            size = None
            if not self._eager:
                size = Size.of(plan, attention_shape(layers[0]), hidden.dtype, processors(hidden.device))
            graph = None if size is None else self._graph(size, hidden, layers, cos.shape, caches)
            if graph is None:
                return decoder_layers(hidden, layers, cos, sin, caches, plan)
            return graph.run(hidden, cos, sin, plan)

    def _graph(
        self,
        size: Size,
        hidden: torch.Tensor,
        layers: Sequence[LayerWeights],
        rotary: torch.Size,
        caches: Sequence[LayerCache],
    ) -> _Graph | None:
        cached = self._graphs.get(size)
        if cached is not None:
            self._graphs.move_to_end(size)
            return cached
        if size not in self._seen:
            self._seen.add(size)
            return None
        while len(self._graphs) >= _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            tables = tuple(rotary[:-2])
            batch = PaddedBatch(size, hidden.shape[1], rotary[-1], hidden.dtype, hidden.device, tables)
            made = self._graphs[size] = _Graph(batch, layers, caches, self._pool)
        except RuntimeError as error:  # too little memory for its buffers, or a driver that cannot capture
            logger.warning("CUDA graphs disabled: %s", str(error).splitlines()[0])
            self._eager = True
            self._graphs.clear()
            return None
        return made
