"""Reads the weights of a layer from a model, and prepares its linear layers in the number format of a span.

Owns which format a matrix gets: the span's, but in a 4-bit span that of its file where 4 bits do not hold it; and
weights of a checkpoint in 4 bits, or in spans of 8 and 4 bits in E4M3, are taken over as they are. Matrices are read
while they are packed, some rows at a time. Knows no layer's structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from swarm.errors import CorruptModel
from swarm_kernels.device.device import CODES4, FLOAT8, INT4
from swarm_kernels.models.native_format import MatrixFormats
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.exact_linear import ExactLinear, dequantized_linear, rounded_linear, stored_linear
from swarm_kernels.ops.base.layer_weights import plain_linear
from swarm_kernels.ops.base.matrix import Matrix, StackedRows
from swarm_kernels.ops.base.stored_weights import StoredWeights, stacked

Pack = Callable[[Matrix, torch.Tensor | None], dispatch.Linear]
"""Prepares a linear layer from its weight and bias."""


@dataclass(frozen=True, slots=True)
class FourBitPacks:
    """`rounded`: from floats. `wide`: of what a checkpoint of 4 bits keeps in 16 bits."""

    rounded: Pack
    wide: Pack


@dataclass(frozen=True, slots=True)
class Packs:
    """How the linear layers of a span are prepared. `wide`: what stays in fp32; `stored`: in a quantized span, weights
    as a checkpoint holds them, their bias, and the inputs; `on_demand`: of packs that keep no weights, likewise of what
    reads them; `four_bits`: of a 4-bit span."""

    plain: Pack
    wide: Callable[[torch.Tensor, torch.Tensor | None], dispatch.Linear] = dispatch.pack_linear
    stored: Callable[[StoredWeights, torch.Tensor | None, int], dispatch.Linear] | None = None
    four_bits: FourBitPacks | None = None
    on_demand: Callable[[Callable[[], StoredWeights | None], torch.Tensor | None, int], dispatch.Linear] | None = None

    def keeps(self, native: torch.dtype) -> bool:
        """Whether what is stored in such a format is taken over as it is."""
        if self.stored is None:
            return False
        return native == FLOAT8 or (self.four_bits is not None and native in (INT4, CODES4))


def packs_of(weights: torch.dtype) -> Packs:
    """Of a span whose weights have this format, one of `device.DTYPES`."""
    if weights.is_floating_point:
        return Packs(dispatch.pack_linear)
    if weights != INT4:
        return Packs(dispatch.quantize_linear, stored=dispatch.pack_stored)
    four_bits = FourBitPacks(partial(dispatch.quantize_linear, bits=4), _pack_bf16)
    return Packs(dispatch.quantize_linear, stored=dispatch.pack_stored, four_bits=four_bits)


def exact_packs_of(weights: torch.dtype) -> Packs:
    """The same layers in plain torch with float activations: what those of `packs_of` approximate. Their weights are
    read from the model by each call."""
    if weights != INT4:
        return Packs(ExactLinear, plain_linear)
    four_bits = FourBitPacks(rounded_linear, ExactLinear)
    return Packs(ExactLinear, plain_linear, dequantized_linear, four_bits, stored_linear)


def _pack_bf16(weight: Matrix, bias: torch.Tensor | None) -> dispatch.Linear:
    return dispatch.pack_linear(StackedRows([weight], torch.bfloat16), bias)


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Shape-checked reads of one model, in the dtype and on the device of a span. All raise CorruptModel."""

    source: ModelSource
    dtype: torch.dtype | None  # None: matrices as the model's files have them
    device: torch.device
    _formats: list[MatrixFormats] = field(default_factory=list)  # of a 4-bit span, once it was asked for

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """On a CPU it is read when its rows are asked for."""
        return self._stacked([name], [rows], columns)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Norm weights, in fp32: they are small, and the kernels compute norms in fp32."""
        return self.wide(name, size)

    def wide(self, name: str, *shape: int) -> torch.Tensor:
        """In fp32, whatever the span's format: small tensors, and what decides where rows go."""
        return self._read(name, shape).to(device=self.device, dtype=torch.float32)

    def parts(self, name: str, *shape: int) -> Callable[[int], torch.Tensor]:
        """Of a tensor whose first dimension counts its parts: the number of one -> the part as it is stored."""
        self._check(name, self.source.shape(name), shape)
        whole = self.source.sliced(name)
        self._check(name, tuple(whole.shape), shape)
        return lambda part: whole[part : part + 1][0]

    def pack_of(self, packs: Packs, names: Sequence[str]) -> Pack:
        """For a matrix that is made of these stored tensors."""
        if packs.four_bits is None:
            return packs.plain
        if not self._formats:
            self._formats.append(MatrixFormats.of(self.source, INT4))
        formats = {self._formats[0][name] for name in names}
        if formats == {INT4}:
            return packs.four_bits.rounded
        return packs.four_bits.wide if torch.bfloat16 in formats else packs.plain

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool, packs: Packs
    ) -> dispatch.Linear:
        """The projections `names` stacked by output, `[sum(rows), columns]`, with their biases."""
        return self.stacked_linear(names, rows, columns, self._biases(names, rows) if bias else None, packs)

    def stacked_linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, biases: torch.Tensor | None, packs: Packs
    ) -> dispatch.Linear:
        """As `linear`, with biases `[sum(rows)]` that are stored elsewhere."""
        if packs.stored is not None:
            stored = self._as_stored(names, rows, columns, packs)
            if stored is not None:
                return packs.stored(stored, biases, columns)
        return self.pack_of(packs, names)(self._stacked(names, rows, columns), biases)

    def _stacked(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Matrix:
        """`[sum(rows), columns]`."""
        parts = []
        for name, count in zip(names, rows, strict=True):
            self._check(name, self.source.shape(name), (count, columns))
            part = self.source.sliced(name)
            self._check(name, tuple(part.shape), (count, columns))
            parts.append(part)
        matrix = StackedRows(parts, self.dtype)
        return matrix if self.device.type == "cpu" else matrix[:].to(self.device)

    def _biases(self, names: Sequence[str], rows: Sequence[int]) -> torch.Tensor:
        return torch.cat(
            [
                self._read(name.removesuffix("weight") + "bias", (count,)).to(self.device, self.dtype or torch.float32)
                for name, count in zip(names, rows, strict=True)
            ]
        )

    def _as_stored(self, names: Sequence[str], rows: Sequence[int], columns: int, packs: Packs) -> StoredWeights | None:
        if not all(packs.keeps(self.source.native(name)) for name in names):
            return None
        parts: list[StoredWeights] = []
        for name, count in zip(names, rows, strict=True):
            self._check(name, self.source.shape(name), (count, columns))
            part = self.source.as_stored(name)
            if part is None:
                return None
            parts.append(part)
        found = stacked(parts)
        return None if found is None else found.to(self.device)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.source.tensor(name)
        self._check(name, tuple(tensor.shape), shape)
        return tensor

    def _check(self, name: str, found: tuple[int, ...], needed: tuple[int, ...]) -> None:
        if found != needed:
            raise CorruptModel(f"tensor {name} has shape {found}, its config needs {needed}")
