"""From bytes of memory to layers and KV tokens, and back.

Owns the arithmetic of the size of a span. Reads only the names and shapes of a model's tensors; uses no device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from swarm.errors import OutOfMemory
from swarm.types import ExpertShare, LayerSpan
from swarm_kernels.device.device import bytes_per_weight, state_dtype
from swarm_kernels.models.layers import (
    HEAD,
    has_tied_head,
    is_beyond,
    is_embedding,
    is_looked_up,
    is_of_experts,
    layer_of,
)
from swarm_kernels.models.native_format import MatrixFormats
from swarm_kernels.models.source import ModelSource
from swarm_node.membership.policy import MemoryPolicy

POLICY = MemoryPolicy()
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The sizes of a model's parts in one dtype, in bytes."""

    num_layers: int
    layer: int  # the heaviest
    embedding: int
    head: int  # with the final norm; tied to the embedding, it is that, and a node with both ends holds it once
    kv_token: int  # of one token in one layer
    context: int  # tokens
    tied: bool = False
    expert: int = 0  # of a mixture, where experts can be held by several nodes
    experts: int = 0  # of a mixture

    @classmethod
    def of(cls, source: ModelSource, dtype: torch.dtype) -> ModelMemory:
        """Of weights in `dtype`, one of `swarm_kernels.device.device.DTYPES`."""
        config = source.config
        tied = has_tied_head(source)
        edge_bytes, formats = bytes_per_weight(dtype)[1], MatrixFormats.of(source, dtype)
        layers, of_experts = [0] * config.num_layers, [0] * config.num_layers
        embedding = head = 0
        for name in source.names():
            unused = (tied and name == HEAD) or is_beyond(name, len(layers))  # some files hold an unused copy
            if unused or is_looked_up(name):
                continue
            count = math.prod(source.shape(name))
            layer = layer_of(name, len(layers))
            if layer is not None:
                size = math.ceil(count * bytes_per_weight(formats[name])[0])
                layers[layer] += size
                of_experts[layer] += size if is_of_experts(name) else 0
            elif is_embedding(name):
                embedding += math.ceil(count * edge_bytes)
            else:
                head += math.ceil(count * edge_bytes)
        head += embedding if tied else 0
        kv_token = config.kv_elements * state_dtype(dtype).itemsize
        experts = config.decoder.mixture.experts if config.decoder and config.decoder.mixture else 0
        expert = math.ceil(max(of_experts) / experts) if experts else 0
        sizes = max(layers), embedding, head, kv_token, config.context_length
        return cls(len(layers), *sizes, tied, expert, experts)

    @property
    def _both_ends(self) -> int:
        return max(self.embedding, self.head) if self.tied else self.embedding + self.head

    @property
    def _layer_with_kv(self) -> int:
        return self.layer + min(self.context, POLICY.kv_tokens_per_layer) * self.kv_token

    def span_bytes(self, span: LayerSpan, held: int | None = None) -> int:
        """Weights alone. `held`: experts of each layer; None: all."""
        first, last = span.start == 0, span.end == self.num_layers
        ends = self._both_ends if first and last else self.embedding * first + self.head * last
        elsewhere = 0 if held is None else self.experts - held
        return len(span) * (self.layer - elsewhere * self.expert) + ends

    def expert_room(self, budget: int) -> int:
        """How many experts of one layer a node could hold that leads nothing."""
        return self._experts_in(budget - POLICY.workspace_bytes)

    def lead_room(self, budget: int) -> int:
        """How many of its experts a node could hold that leads one layer, wherever it lies; -1: it could not lead."""
        rest = self._layer_with_kv - self.experts * self.expert
        room = budget - POLICY.workspace_bytes - max(self.embedding, self.head) - rest
        return self._experts_in(room) if room >= 0 and self.expert else -1

    def _experts_in(self, room: int) -> int:
        return max(0, min(room // self.expert, self.experts)) if self.expert else 0

    def check_experts(self, budget: int, share: ExpertShare) -> None:
        """Raises OutOfMemory unless experts that are held for leaders fit."""
        taken = POLICY.workspace_bytes + len(share.layers) * len(share.experts) * self.expert
        if taken > budget:
            raise OutOfMemory(
                f"{share} take {taken / MIB:.0f} MiB, more than {budget / MIB:.0f} MiB; hold fewer of them or raise "
                "--max-memory"
            )

    def memory_for(self, layers: int) -> int:
        """The least budget for which `capacity` is `layers`, bytes."""
        ends = self._both_ends if layers >= self.num_layers else max(self.embedding, self.head)
        return POLICY.workspace_bytes + ends + layers * self._layer_with_kv

    def capacity(self, budget: int) -> int:
        """Layers that fit into `budget` bytes with their keys and values, wherever in the model they lie.

        The span is not chosen yet, so room is reserved for the larger of embedding and head.
        Raises OutOfMemory when not one layer fits.
        """
        if budget >= self.memory_for(self.num_layers):
            return self.num_layers
        room = budget - POLICY.workspace_bytes - max(self.embedding, self.head)
        layers = min(room // self._layer_with_kv, self.num_layers - 1)
        if layers < 1:
            raise OutOfMemory(
                f"{budget / MIB:.0f} MiB of memory do not hold one layer of this model, which takes "
                f"{self.memory_for(1) / MIB:.0f} MiB; free some, raise --max-memory or choose a smaller --dtype"
            )
        return int(layers)

    def kv_tokens(self, budget: int, span: LayerSpan, most: int, held: int | None = None) -> int:
        """KV tokens each layer of `span` can hold within `budget`, at most `most`; `held` as for `span_bytes`. Raises
        OutOfMemory if none."""
        room = budget - POLICY.workspace_bytes - self.span_bytes(span, held)
        tokens = min(room // (len(span) * self.kv_token), most)
        if tokens < 1:
            taken = POLICY.workspace_bytes + self.span_bytes(span, held)
            raise OutOfMemory(
                f"layers {span} take {taken / MIB:.0f} MiB, which leaves nothing of "
                f"{budget / MIB:.0f} MiB for keys and values; serve fewer layers or raise --max-memory"
            )
        return int(tokens)
