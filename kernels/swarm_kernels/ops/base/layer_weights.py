"""A decoder layer, as every backend takes it: its weights and which variant of attention and MLP it is; and the plain
torch linear layer.

Knows no backend: `cpu.cpu_linear`, `int8_linear` and `int4_linear` make other linear layers, `experts` and
`cpu.cpu_experts` the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
import torch.nn.functional as F

from swarm_kernels.ops.base.matrix import Matrix
from swarm_kernels.ops.base.routing import Routing


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


class OfMatrix:
    """A linear layer whose shape is that of its `weight [N, K]`."""

    __slots__ = ()
    weight: Matrix

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


class PackedRows(Protocol):
    """Weights `[out_features, padded_inputs]` in codes, of any format."""

    @property
    def padded_inputs(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class OfCodes:
    """A linear layer whose shape and size are those of its codes and its bias."""

    __slots__ = ()
    weights: PackedRows
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.weights.padded_inputs

    @property
    def out_features(self) -> int:
        return self.weights.out_features

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear(OfMatrix):
    """torch's own linear in the weight's dtype, whatever the dtype of `x`."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids)


class Activation(IntEnum):
    """Of a gated MLP's gates. The numbers are those of `SwarmActivation` in cpu/abi.h."""

    SILU = 0
    GELU_TANH = 1  # Gemma's approximation by tanh
    GELU = 2  # by the error function


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Self-attention of a layer. `qkv` stacks the query, key and value projections by output.

    A row at position p sees keys at distance < `window`, or those of its chunk, p // `chunk`, or all before it.
    """

    qkv: Linear  # hidden -> (heads + 2 kv_heads) head_dim
    o: Linear  # heads head_dim -> hidden
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores, usually head_dim ** -0.5
    q_norm: torch.Tensor | None = None  # RMS norm: [head_dim] of each head, or [heads head_dim] of all at once (OLMo 2)
    k_norm: torch.Tensor | None = None  # likewise, [head_dim] or [kv_heads head_dim]
    rope: int | None = 0  # which of the step's rotary tables; None: queries and keys are not rotated
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None  # scores are cap * tanh(score / cap) (Gemma 2)
    sinks: torch.Tensor | None = None  # [heads] fp32: a score that joins the softmax and has no value (gpt-oss)

    @property
    def norm_is_whole(self) -> bool:
        """Whether queries and keys are normed over all heads at once."""
        norm, heads = (self.q_norm, self.heads) if self.q_norm is not None else (self.k_norm, self.kv_heads)
        return norm is not None and heads > 1 and norm.shape[0] == heads * self.head_dim

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.o.nbytes + _nbytes(self.q_norm, self.k_norm, self.sinks)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """`down(activation(gate) * up)`; `gate_up` stacks the gate and up projections by output."""

    gate_up: Linear  # hidden -> 2 intermediate
    down: Linear  # intermediate -> hidden
    activation: Activation = Activation.SILU

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


class Experts(Protocol):
    """Experts whose weights were packed once. Batch-invariant where their linear layers are."""

    @property
    def count(self) -> int: ...

    @property
    def hidden(self) -> int:
        """Width of their inputs and outputs."""
        ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`x [n, hidden]` -> likewise: the sum of the outputs of row i's experts, `index [n, k]` int64, times
        `scores [n, k]`, in their order. Raises KernelError for an expert that is not there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A mixture of experts: the sum of the outputs of a row's experts, times their scores, and of a shared expert that
    all rows take, times the sigmoid of its gate if it has one.

    Routers are computed in fp32, whatever the format of the experts: an error there sends rows elsewhere.
    """

    router: Linear  # hidden -> experts, fp32
    routing: Routing
    experts: Experts
    correction: torch.Tensor | None = None  # [experts] fp32, see `Routing`
    shared: GatedMlp | None = None
    shared_gate: Linear | None = None  # hidden -> 1, fp32

    @property
    def nbytes(self) -> int:
        parts = (self.router, self.experts, self.shared, self.shared_gate)
        return sum(part.nbytes for part in parts if part is not None) + _nbytes(self.correction)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerWeights:
    """One decoder layer: attention, then an MLP or a mixture of them, each added to the residual stream:

    `hidden += residual_scale * post_norm(part(norm(hidden)))`. All norms are RMS norms with weights `[hidden]`, and
    any may be missing: Llama has only those before the parts, OLMo 2 only those after them, Gemma 2 both.

    Where hidden states travel in a narrower format than they are added in, `rounding` is that format (to nearest, ties
    to even, as for the wire): then it does not matter after which layers they travel.
    """

    attention: Attention
    mlp: GatedMlp | Mixture
    attn_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    eps: float
    attn_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    residual_scale: float = 1.0
    rounding: torch.dtype | None = None  # of hidden states after the layer; None: they keep their own number format

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.attention.o.out_features

    @property
    def norms(self) -> tuple[torch.Tensor | None, ...]:
        """Of the residual stream: before and after attention, before and after the MLP."""
        return self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + self.mlp.nbytes + _nbytes(*self.norms)


def _nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """`weight [N, K]` of any float dtype and device, unchanged; `bias [N]` is converted to the weight's dtype."""
    return PlainLinear(weight, None if bias is None else bias.to(weight.dtype))
