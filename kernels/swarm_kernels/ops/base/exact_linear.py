"""Linear layers in plain torch with float activations, which those of 8 and 4 bits are checked against.

Their weights are read, rounded and dequantized again by each call, some rows at a time: a layer takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm_kernels.ops.base import int4_linear
from swarm_kernels.ops.base.layer_weights import Linear, OfMatrix
from swarm_kernels.ops.base.matrix import Matrix, row_chunks
from swarm_kernels.ops.base.stored_weights import StoredWeights


@dataclass(frozen=True, slots=True, eq=False)
class ExactLinear(OfMatrix):
    """See `layer_weights.Linear`. Computes in fp32."""

    weight: Matrix
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return 0 if self.bias is None else self.bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        out = torch.cat([F.linear(wide, part.float()) for _, part in row_chunks(self.weight)], 1)
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.weight[row : row + 1].float() for row in ids.tolist()])


@dataclass(frozen=True, slots=True, eq=False)
class _Rounded:
    """A Matrix: another one, rounded to 4 bits."""

    weight: Matrix
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        return _dequantized(int4_linear.quantize_weight(self.weight[rows]), self.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class _Dequantized:
    """A Matrix: what stored weights stand for."""

    weights: StoredWeights
    in_features: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.weights.out_features, self.in_features))

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        return _dequantized(self.weights.rows(rows), self.in_features)


def rounded_linear(weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
    """The layer with dequantized 4-bit weights: the exact result that `int4_linear.Int4Linear` approximates."""
    return ExactLinear(_Rounded(weight), bias)


def dequantized_linear(weights: StoredWeights, bias: torch.Tensor | None, in_features: int) -> Linear:
    """As `rounded_linear`, of weights as a checkpoint holds them."""
    return ExactLinear(_Dequantized(weights, in_features), bias)


@dataclass(frozen=True, slots=True, eq=False)
class _ReadByEachCall(OfMatrix):
    """A Linear whose stored weights are read by each call and dropped after it."""

    read: Callable[[], StoredWeights | None]
    bias: torch.Tensor | None
    weight: torch.Tensor  # on the meta device: the shape

    @property
    def nbytes(self) -> int:
        return 0 if self.bias is None else self.bias.nbytes

    def _linear(self) -> Linear:
        weights = self.read()
        assert weights is not None  # it was there once
        return dequantized_linear(weights, self.bias, self.weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear()(x)

    def embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._linear().embedding_rows(ids)


def stored_linear(read: Callable[[], StoredWeights | None], bias: torch.Tensor | None, in_features: int) -> Linear:
    """As `dequantized_linear`, of weights that `read` returns, and that each call reads again."""
    weights = read()
    assert weights is not None
    return _ReadByEachCall(read, bias, torch.empty(weights.out_features, in_features, device="meta"))


def _dequantized(weights: StoredWeights, in_features: int) -> torch.Tensor:
    return weights.embedding_rows(torch.arange(weights.out_features, device=weights.device))[:, :in_features]
