"""The weights of a decoder layer, as every backend takes them, and the plain torch linear layer.

Knows no backend: `cpu.cpu_linear`, `int8_linear` and `int4_linear` make other linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """`y = x W^T + b` with weights packed once: `x [n, in_features]` -> `[n, out_features]` of x's dtype."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The weights of outputs `ids [n]`, `[n, in_features]`: the embedding lookup of a tied output head."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """torch's own linear in the weight's dtype, whatever the dtype of `x`."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerWeights:
    """One Llama-like decoder layer: pre-norm attention with rotary positions, then a gated SiLU MLP.

    `qkv` stacks the query, key and value projections by output, `gate_up` the gate and up projections. `q_norm` and
    `k_norm` are Qwen3's RMS norms of each head. Norm weights are `[hidden]` and `[head_dim]`.
    """

    attn_norm: torch.Tensor
    qkv: Linear  # hidden -> (heads + 2 kv_heads) head_dim
    o: Linear  # heads head_dim -> hidden
    mlp_norm: torch.Tensor
    gate_up: Linear  # hidden -> 2 intermediate
    down: Linear  # intermediate -> hidden
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of the attention scores, usually head_dim ** -0.5
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """`weight [N, K]` of any float dtype and device, unchanged; `bias [N]` is converted to the weight's dtype."""
    return PlainLinear(weight, None if bias is None else bias.to(weight.dtype))
