"""From bytes of memory to layers and KV tokens, and back.

Owns the arithmetic of what a span weighs. Reads only the names and shapes of a model's tensors; knows no device.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from swarm.errors import OutOfMemory
from swarm.types import LayerSpan
from swarm_kernels.model_source import ModelSource

KV_TOKENS_WANTED = 16384
"""KV tokens a layer should have room for before a node takes another layer; fewer if the model's context is shorter."""

WORKSPACE = 64 << 20  # bytes: activations of a batch, logits, buffers of frames
MIB = 1 << 20

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_INPUT = re.compile(r"embed_tokens|embed_in|wte|wpe|embeddings?\.")


@dataclass(frozen=True, slots=True)
class Weights:
    """What the parts of a model weigh in one number format, in bytes."""

    num_layers: int
    layer: int  # the heaviest
    embedding: int
    head: int  # with the final norm; a head tied to the embedding is a second copy on another node
    kv_token: int  # of one token in one layer
    context: int  # tokens

    @classmethod
    def of(cls, source: ModelSource, element_bytes: int, state_bytes: int | None = None) -> Weights:
        """Of weights in `element_bytes` an element; keys and values too, unless `state_bytes` is given."""
        layers = [0] * source.config.num_layers
        embedding = head = 0
        for name in source.names():
            size = math.prod(source.shape(name)) * element_bytes
            match = _LAYER.search(name)
            if match and int(match[1]) < len(layers):
                layers[int(match[1])] += size
            elif _INPUT.search(name):
                embedding += size
            else:
                head += size
        config = source.config
        if config.tie_word_embeddings or not source.has("lm_head.weight"):
            head += embedding
        kv_token = 2 * config.num_kv_heads * config.head_dim * (state_bytes or element_bytes)
        return cls(len(layers), max(layers), embedding, head, kv_token, config.context_length)

    @property
    def _layer_with_kv(self) -> int:
        return self.layer + min(self.context, KV_TOKENS_WANTED) * self.kv_token

    def span_bytes(self, span: LayerSpan) -> int:
        """Weights alone."""
        ends = self.embedding * (span.start == 0) + self.head * (span.end == self.num_layers)
        return len(span) * self.layer + ends

    def memory_for(self, layers: int) -> int:
        """The least budget for which `capacity` is `layers`, bytes."""
        ends = self.embedding + self.head if layers >= self.num_layers else max(self.embedding, self.head)
        return WORKSPACE + ends + layers * self._layer_with_kv

    def capacity(self, budget: int) -> int:
        """Layers that fit into `budget` bytes with their keys and values, wherever in the model they lie.

        A node does not know yet whether it will hold the embedding or the head, so room for the heavier is set aside.
        Raises OutOfMemory when not one layer fits.
        """
        if budget >= self.memory_for(self.num_layers):
            return self.num_layers
        room = budget - WORKSPACE - max(self.embedding, self.head)
        layers = min(room // self._layer_with_kv, self.num_layers - 1)
        if layers < 1:
            raise OutOfMemory(
                f"{budget / MIB:.0f} MiB of memory do not hold one layer of this model, which takes "
                f"{self.memory_for(1) / MIB:.0f} MiB; free some, raise --max-memory or choose a smaller --dtype"
            )
        return int(layers)

    def kv_tokens(self, budget: int, span: LayerSpan, most: int) -> int:
        """KV tokens each layer of `span` can hold within `budget`, at most `most`. Raises OutOfMemory if none."""
        room = budget - WORKSPACE - self.span_bytes(span)
        tokens = min(room // (len(span) * self.kv_token), most)
        if tokens < 1:
            raise OutOfMemory(
                f"layers {span} take {(WORKSPACE + self.span_bytes(span)) / MIB:.0f} MiB, which leaves nothing of "
                f"{budget / MIB:.0f} MiB for keys and values; serve fewer layers or raise --max-memory"
            )
        return int(tokens)
