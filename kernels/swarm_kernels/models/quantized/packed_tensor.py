"""A weight that a checkpoint stores in several tensors, and how they become one. Owns the types; reads no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm.errors import CorruptModel
from swarm_kernels.ops.base.stored_weights import StoredWeights

Parts = Mapping[str, torch.Tensor]
"""Role ("weight", "scale", ...) -> the stored tensor."""


class Stored(Protocol):
    """A tensor of a checkpoint's table."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """As safetensors names it."""
        ...


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """`parts`: role -> stored name. `dtype`: of what `unpack` returns, `[*shape]`.

    `as_stored`: the same weights for our kernels without another rounding, of formats that they have; its result is
    None where these parts do not fit. `native`: see `ModelSource.native`. `stacked`: the first dimension of all parts
    counts a layer's experts, and `as_stored` takes those of one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, str]
    unpack: Callable[[Parts], torch.Tensor]
    as_stored: Callable[[Parts], StoredWeights | None] | None = None
    native: torch.dtype = torch.int8
    stacked: bool = False

    @property
    def nbytes(self) -> int:
        """Of what `unpack` returns."""
        return math.prod(self.shape) * self.dtype.itemsize


class Table:
    """The stored tensors of one checkpoint, with the checks that every format needs."""

    def __init__(self, stored: Mapping[str, Stored], where: str) -> None:
        self.stored = stored
        self.where = where

    def shape(self, name: str, dims: int | None = None) -> tuple[int, ...]:
        """Raises CorruptModel if there is no such tensor, or it has not so many dimensions."""
        if name not in self.stored:
            raise CorruptModel(f"{self.where} has no tensor '{name[:120]}'; fetch the model again")
        shape = self.stored[name].shape
        if dims is not None and len(shape) != dims:
            raise CorruptModel(f"{self.where}: '{name[:120]}' has the shape {list(shape)}, not {dims} dimensions")
        return shape

    def expect(self, name: str, *allowed: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor that must be one of `allowed`, else CorruptModel."""
        shape = self.shape(name)
        if shape not in allowed:
            wanted = " or ".join(str(list(each)) for each in allowed)
            raise CorruptModel(f"{self.where}: '{name[:120]}' has the shape {list(shape)}, but {wanted} is needed")
        return shape

    def floating(self, name: str) -> torch.dtype:
        """The dtype of a tensor that must hold fp32, fp16 or bf16 numbers, else CorruptModel."""
        dtype = FLOATING.get(self.stored[name].dtype)
        if dtype is None:
            raise CorruptModel(f"{self.where}: '{name[:120]}' is stored as {self.stored[name].dtype}, not as floats")
        return dtype


FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
