"""Packs experts that a parameter holds one above the other, one after another: their 4 bits as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.errors import CorruptModel
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.runtime.weight_reader import Packs, WeightReader


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One projection of all experts. `names`: the stored tensors that it is made of; `sole`: the one that it is, or
    None; `read`: of an expert's number, its matrix as the parameter has it. `interleaved`: outputs are gates and values
    in turns, and become gates before values."""

    name: str
    names: Sequence[str]
    sole: str | None
    count: int
    outputs: int
    inputs: int
    read: Callable[[int], torch.Tensor]
    biases: torch.Tensor | None  # [count, outputs]
    transposed: bool = False
    interleaved: bool = False

    def packed(self, reader: WeightReader, packs: Packs) -> list[Linear]:
        """Raises CorruptModel."""
        order = _gates_first(self.outputs) if self.interleaved else slice(None)
        pack = reader.pack_of(packs, self.names)
        linears = []
        for expert in range(self.count):
            bias = None if self.biases is None else self.biases[expert][order]
            linear = self._in_four_bits(reader, packs, expert, order, bias)
            if linear is None:
                weight = self.read(expert)
                weight = weight.T if self.transposed else weight
                if tuple(weight.shape) != (self.outputs, self.inputs):
                    raise CorruptModel(
                        f"expert {expert} of {self.name} has shape {tuple(weight.shape)}, "
                        f"not {(self.outputs, self.inputs)}"
                    )
                weight = weight.to(device=reader.device, dtype=reader.dtype or weight.dtype)
                linear = pack(weight[order].contiguous(), bias)
            linears.append(linear)
        return linears

    def _in_four_bits(
        self,
        reader: WeightReader,
        packs: Packs,
        expert: int,
        order: torch.Tensor | slice,
        bias: torch.Tensor | None,
    ) -> Linear | None:
        """An expert as it is stored in 4 bits; None if it is not."""
        if packs.four_bits is None or self.sole is None:
            return None
        weights = reader.source.four_bits(self.sole, expert)
        if weights is None:
            return None
        if weights.out_features != self.outputs or weights.padded_inputs != self.inputs:
            raise CorruptModel(
                f"expert {expert} of {self.sole} does not have the shape {(self.outputs, self.inputs)} of its config"
            )
        return packs.four_bits.stored(weights.rows(order).to(reader.device), bias, self.inputs)


def _gates_first(outputs: int) -> torch.Tensor:
    """The order of rows that alternate between gates and values."""
    return torch.arange(outputs).view(-1, 2).T.flatten()
