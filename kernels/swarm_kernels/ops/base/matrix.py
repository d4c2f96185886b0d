"""A weight matrix that need not be in memory as a whole: packed and multiplied some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

CHUNK_WEIGHTS = 1 << 18
"""Read, quantized and packed at a time, so that temporaries stay in the CPU caches."""


class Matrix(Protocol):
    """`[N, K]` of a float dtype, or `[N, ...]`. A tensor is one; others read the rows that a slice asks for."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


def row_chunks(matrix: Matrix, multiple: int = 16) -> Iterator[tuple[slice, torch.Tensor]]:
    """All rows in order, in pieces of about `CHUNK_WEIGHTS`; each but the last has a `multiple` of rows."""
    outputs, inputs = matrix.shape
    step = max(1, CHUNK_WEIGHTS // max(1, inputs) // multiple) * multiple
    for start in range(0, outputs, step):
        rows = slice(start, min(start + step, outputs))
        yield rows, matrix[rows]


@dataclass(frozen=True, slots=True, eq=False)
class StackedRows:
    """Matrices under each other, in the dtype that holds all of theirs, or in `to`."""

    parts: Sequence[Matrix]
    to: torch.dtype | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        if self.to is not None:
            return self.to
        dtype = self.parts[0].dtype
        for part in self.parts[1:]:
            dtype = torch.promote_types(dtype, part.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        dtype, pieces, before = self.dtype, [], 0
        for part in self.parts:
            count = part.shape[0]
            first, last = max(start - before, 0), min(stop - before, count)
            if first < last:
                pieces.append(part[first:last].to(dtype))
            before += count
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, self.shape[1], dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class ReadByParts:
    """A tensor on the CPU, whose parts `[start:stop]` of the first dimension are read when they are asked for."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        return self.read(start, max(start, stop))
