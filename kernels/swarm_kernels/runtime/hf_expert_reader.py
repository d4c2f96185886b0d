"""Reads the experts of one module of transformers and packs them one after another.

Beside what is packed, memory holds one expert, also where a model's files keep a layer's experts in one tensor; only
where transformers puts a tensor together in other ways, all of the layer's of one projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from swarm.errors import CorruptModel
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.ops.base.matrix import Matrix
from swarm_kernels.runtime.hf_conversions import StoredParameter
from swarm_kernels.runtime.mixture_reader import StackedExperts
from swarm_kernels.runtime.weight_reader import Packs, WeightReader


class ExpertReader:
    """Of the experts module `name`, whose parameters are made up of `stored`."""

    def __init__(
        self, reader: WeightReader, stored: Mapping[str, StoredParameter], name: str, module: Any, packs: Packs
    ) -> None:
        self._reader = reader
        self._stored = stored
        self._module = module
        self._packs = packs
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self._first, self._second = f"{name}.{first}", f"{name}.down_proj"
        self.parameters = {self._first, self._second}
        if module.has_bias:
            self.parameters |= {f"{self._first}_bias", f"{self._second}_bias"}

    def read(self) -> tuple[list[Linear], list[Linear]]:
        """The two linear layers of each expert; of the first, gates before values. Raises CorruptModel."""
        interleaved = self._module.has_gate and not self._module.is_concatenated
        return self._projection(self._first, interleaved), self._projection(self._second, False)

    def _projection(self, name: str, interleaved: bool) -> list[Linear]:
        count, *sizes = getattr(self._module, name.rsplit(".", 1)[1]).shape
        outputs, inputs = reversed(sizes) if self._module.is_transposed else sizes
        biases = self._biases(f"{name}_bias", count, outputs) if self._module.has_bias else None
        found = self._stored.get(name)
        if found is None:
            raise CorruptModel(f"the model's files hold no tensor for {name}")
        apart = found.pieces() == count
        if apart and found.is_concatenated() and not (self._module.is_transposed or interleaved):
            shapes = {part: self._reader.source.shape(part) for part in found.names}
            return [self._as_stored(found.piece_names(e), shapes, inputs, outputs, biases, e) for e in range(count)]
        read = self._pieces(found, (count, *sizes), apart)
        stacked = StackedExperts(
            name, found.names, found.sole, count, outputs, inputs, read, biases, self._module.is_transposed, interleaved
        )
        return stacked.packed(self._reader, self._packs)

    def _pieces(self, found: StoredParameter, shape: tuple[int, ...], apart: bool) -> Callable[[int], torch.Tensor]:
        """-> the number of an expert -> its part of the parameter."""
        source = self._reader.source
        if apart:
            return lambda expert: found.piece(source, expert)
        whole: Matrix = found.whole(source) if found.sole is None else source.sliced(found.sole)
        if tuple(whole.shape) != shape:
            raise CorruptModel(f"tensor {found.names[0]} has shape {tuple(whole.shape)}, its config needs {shape}")
        return lambda expert: whole[expert : expert + 1][0]

    def _as_stored(
        self,
        names: list[str],
        shapes: Mapping[str, tuple[int, ...]],
        inputs: int,
        outputs: int,
        biases: torch.Tensor | None,
        expert: int,
    ) -> Linear:
        """Of matrices that need no rearranging: what is stored in 4 bits stays as it is."""
        rows = [shapes[name][0] for name in names]
        if sum(rows) != outputs:
            raise CorruptModel(f"tensors {', '.join(names)} have {sum(rows)} rows, their config needs {outputs}")
        return self._reader.stacked_linear(names, rows, inputs, None if biases is None else biases[expert], self._packs)

    def _biases(self, name: str, count: int, outputs: int) -> torch.Tensor:
        found = self._stored.get(name)
        if found is None:
            raise CorruptModel(f"the model's files hold no tensor for {name}")
        biases = found.whole(self._reader.source)
        if tuple(biases.shape) != (count, outputs):
            raise CorruptModel(f"tensor {name} has shape {tuple(biases.shape)}, its config needs {(count, outputs)}")
        return biases.to(self._reader.device, torch.float32)
