"""Reads the weights of a layer from a model, and prepares its linear layers in the number format of a span.

Owns which format a matrix gets: the span's, but 8 bits in a 4-bit span for what a checkpoint holds in 5 to 8 bits; and
4-bit weights of a checkpoint are taken over as they are. Knows no layer's structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from swarm.errors import CorruptModel
from swarm_kernels.device.device import INT4
from swarm_kernels.models.native_format import matrix_dtype
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int4_linear
from swarm_kernels.ops.base.int4_linear import FourBitWeights
from swarm_kernels.ops.base.layer_weights import plain_linear

Pack = Callable[[torch.Tensor, torch.Tensor | None], dispatch.Linear]
"""Prepares a linear layer from its weight and bias."""


@dataclass(frozen=True, slots=True)
class FourBitPacks:
    """`rounded`: from floats. `stored`: from weights that are in 4 bits already, their bias, and the inputs."""

    rounded: Pack
    stored: Callable[[FourBitWeights, torch.Tensor | None, int], dispatch.Linear]


@dataclass(frozen=True, slots=True)
class Packs:
    """How the linear layers of a span are prepared. `four_bits`: of a 4-bit span; `wide`: what stays in fp32."""

    plain: Pack
    wide: Pack = dispatch.pack_linear
    four_bits: FourBitPacks | None = None

    def rounding(self, source: ModelSource, names: Sequence[str]) -> Pack:
        """For a matrix that is made from these stored tensors: in a 4-bit span too, 8 bits for what has 5 to 8."""
        if self.four_bits is None or any(matrix_dtype(source, name, INT4) != INT4 for name in names):
            return self.plain
        return self.four_bits.rounded


def packs_of(weights: torch.dtype) -> Packs:
    """Of a span whose weights have this format, one of `device.DTYPES`."""
    if weights.is_floating_point:
        return Packs(dispatch.pack_linear)
    if weights != INT4:
        return Packs(dispatch.quantize_linear)
    four_bits = FourBitPacks(partial(dispatch.quantize_linear, bits=4), dispatch.pack_four_bits)
    return Packs(dispatch.quantize_linear, four_bits=four_bits)


def exact_packs_of(weights: torch.dtype) -> Packs:
    """The same layers in plain torch with float activations: what those of `packs_of` approximate."""
    if weights != INT4:
        return Packs(plain_linear, plain_linear)
    return Packs(plain_linear, plain_linear, FourBitPacks(int4_linear.rounded_linear, int4_linear.dequantized_linear))


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Shape-checked reads of one model, in the dtype and on the device of a span. All raise CorruptModel."""

    source: ModelSource
    dtype: torch.dtype | None  # None: matrices as the model's files have them
    device: torch.device

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        tensor = self._read(name, (rows, columns))
        return tensor.to(device=self.device, dtype=self.dtype or tensor.dtype)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Norm weights, in fp32: they are small, and the kernels compute norms in fp32."""
        return self.wide(name, size)

    def wide(self, name: str, *shape: int) -> torch.Tensor:
        """In fp32, whatever the span's format: small tensors, and what decides where rows go."""
        return self._read(name, shape).to(device=self.device, dtype=torch.float32)

    def stored(self, name: str, *shape: int) -> torch.Tensor:
        """As the model's files have it."""
        return self._read(name, shape)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool, packs: Packs
    ) -> dispatch.Linear:
        """The projections `names` stacked by output, `[sum(rows), columns]`, with their biases."""
        if packs.four_bits is not None:
            stored = self._four_bits(names, rows, columns)
            if stored is not None:
                return packs.four_bits.stored(stored, self._biases(names, rows) if bias else None, columns)
        pack = packs.rounding(self.source, names)
        return pack(self._stacked(names, rows, columns), self._biases(names, rows) if bias else None)

    def _stacked(self, names: Sequence[str], rows: Sequence[int], columns: int) -> torch.Tensor:
        """`[sum(rows), columns]`; beside it, memory holds one part at a time."""
        part = self.matrix(names[0], rows[0], columns)
        if len(names) == 1:
            return part
        stacked, end = part.new_empty(sum(rows), columns), rows[0]
        stacked[:end] = part
        for name, count in zip(names[1:], rows[1:], strict=True):
            del part
            part = self.matrix(name, count, columns)
            stacked = stacked.to(torch.promote_types(stacked.dtype, part.dtype))  # no copy where they are alike
            stacked[end : end + count] = part
            end += count
        return stacked

    def _biases(self, names: Sequence[str], rows: Sequence[int]) -> torch.Tensor:
        return torch.cat(
            [
                self._read(name.removesuffix("weight") + "bias", (count,)).to(self.device, self.dtype or torch.float32)
                for name, count in zip(names, rows, strict=True)
            ]
        )

    def _four_bits(self, names: Sequence[str], rows: Sequence[int], columns: int) -> FourBitWeights | None:
        if any(self.source.native(name) != INT4 for name in names):
            return None
        parts: list[FourBitWeights] = []
        for name, count in zip(names, rows, strict=True):
            self._check(name, self.source.shape(name), (count, columns))
            part = self.source.four_bits(name)
            if part is None:
                return None
            parts.append(part)
        return FourBitWeights(
            torch.cat([part.numbers for part in parts]).to(self.device),
            torch.cat([part.scale for part in parts]).to(self.device),
            torch.cat([part.minimum for part in parts]).to(self.device),
        )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.source.tensor(name)
        self._check(name, tuple(tensor.shape), shape)
        return tensor

    def _check(self, name: str, found: tuple[int, ...], needed: tuple[int, ...]) -> None:
        if found != needed:
            raise CorruptModel(f"tensor {name} has shape {found}, its config needs {needed}")
