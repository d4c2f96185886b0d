"""Bytes and FLOPs of a decoder, from its shape. Knows no device."""

from __future__ import annotations

import msgspec


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Llama-like decoder. `weight_bytes`: of one parameter (0.5625 for 4 bits and a 16-bit scale per 32)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0  # of one number in the KV cache
    activation_bytes: float = 2.0  # of one number on the wire
    tied_head: bool = False

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_bytes(self) -> float:
        return self.layer_parameters * self.weight_bytes

    @property
    def head_bytes(self) -> float:
        """Of the LM head, and of the embedding."""
        return self.hidden * self.vocabulary * self.weight_bytes

    @property
    def kv_token_bytes(self) -> float:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def row_flops(self) -> float:
        """Of one row in one layer, attention over the context left out."""
        return 2.0 * self.layer_parameters

    @property
    def context_flops(self) -> float:
        """Of one row in one layer for each token it looks at."""
        return 4.0 * self.heads * self.head_dim

    @property
    def row_bytes(self) -> float:
        """Of one row of hidden state on the wire."""
        return self.hidden * self.activation_bytes

    def memory_bytes(self, start: int, end: int) -> float:
        """Weights of layers `[start, end)` with the embedding and the head where they belong."""
        ends = (start == 0) + (end == self.layers)
        return (end - start) * self.layer_bytes + ends * self.head_bytes
