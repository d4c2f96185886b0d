"""A weight that a checkpoint stores in several tensors, and how they become one. Owns the types; reads no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm.errors import CorruptModel
from swarm_kernels.device.device import CODES4, INT4
from swarm_kernels.ops.base.codebook_linear import StoredFourBits

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

    `four_bits`: the same weights for our 4-bit kernels, of formats that have such groups; None where these parts do
    not fit. `codes`: whether they are codes of 4 bits. `stacked`: the first dimension of all parts counts a layer's
    experts, and `four_bits` takes those of one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, str]
    unpack: Callable[[Parts], torch.Tensor]
    four_bits: Callable[[Parts], StoredFourBits | None] | None = None
    codes: bool = False
    stacked: bool = False

    @property
    def native(self) -> torch.dtype:
        """See `ModelSource.native`."""
        if self.four_bits is None:
            return torch.int8
        return CODES4 if self.codes else INT4

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
