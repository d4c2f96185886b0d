"""How a tensor under Hugging Face's name is made of what a GGUF file stores.

Owns the ways: a stored tensor as it is, its rows in another order, one expert of three dimensions, and tensors that
llama.cpp's converter split, shifted or transposed. Reads no file; shapes are checked before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm.errors import CorruptModel
from swarm_kernels.models.gguf_types.metadata import GgufEntry

if TYPE_CHECKING:  # imported where a tensor is made: a client reads only headers
    import torch

    Parts = Iterator[torch.Tensor]
    """The slices of a view, each read when it is asked for."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A stored tensor, or one expert of it. `offset`: bytes from its start. `heads`: of how many heads llama.cpp
    interleaved the two halves, 0 for none."""

    tensor: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    heads: int = 0

    def rows(self, start: int, stop: int) -> Slice:
        """`[start:stop]` of a matrix whose rows are not interleaved."""
        assert 0 <= start <= stop <= self.shape[0]
        assert not self.heads
        each = self.nbytes // self.shape[0]
        return Slice(self.tensor, (stop - start, *self.shape[1:]), self.offset + start * each, (stop - start) * each)


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """How an expert is made of its slices, matrices `[out, in]`: `make`; or, where they stay packed, the outputs of all
    in this `order`, None for theirs."""

    make: Callable[[Parts], torch.Tensor]
    order: Callable[[], torch.Tensor] | None = None

    def stack(self, parts: Parts, count: int) -> torch.Tensor:
        """So many experts, one after another, `[count, ...]`."""
        out: torch.Tensor | None = None
        for expert in range(count):
            part = self.make(parts)
            out = part.new_empty((count, *part.shape)) if out is None else out
            out[expert] = part
        assert out is not None
        return out


@dataclass(frozen=True, slots=True)
class View:
    """A tensor `[*shape]`. `make`: of its slices, in order; None where it is its one slice. `experts`: how each of
    those that it holds is made of as many slices."""

    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    make: Callable[[Parts], torch.Tensor] | None = None
    experts: ExpertParts | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the file has this matrix as it is, but for the order of its rows."""
        return self.make is None

    def expert_slices(self, start: int, stop: int) -> tuple[Slice, ...]:
        """Of experts `[start:stop]`."""
        each = len(self.slices) // self.shape[0]
        return self.slices[start * each : stop * each]


Build = Callable[[Sequence[GgufEntry], Mapping[str, Any], str], Iterator[tuple[str, View]]]
"""GgufEntry tensors, the config and the Hugging Face name -> names and views. Raises CorruptModel."""


def whole(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
    """As it is stored."""
    yield name, View(stored[0].shape, (_all_of(stored[0]),))


def interleaved_heads(field: str) -> Build:
    """Query or key rows, of `config[field]` heads: llama.cpp rotates neighboring values, `rotate_half` halves."""

    def build(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
        heads, rows = config[field], stored[0].shape[0]
        if rows % (2 * heads):
            raise _misshapen(stored[0])
        yield name, View(stored[0].shape, (_all_of(stored[0], heads),))

    return build


def shifted(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
    """A norm whose weight Hugging Face stores less one."""
    yield name, View(stored[0].shape, (_all_of(stored[0]),), lambda parts: next(parts).float() - 1.0)


def one_row(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
    """A vector, or a matrix of one row, as a matrix of one row."""
    shape = (1, math.prod(stored[0].shape))
    yield name, View(shape, (_all_of(stored[0]),), lambda parts: next(parts).reshape(shape))


def middle_dimension(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
    """`[channels, length]` as `[channels, 1, length]`."""
    channels, length = _dims(stored[0], 2)
    yield name, View((channels, 1, length), (_all_of(stored[0]),), lambda parts: next(parts).unsqueeze(1))


def each_expert(field: str) -> Build:
    """`[experts, rows, columns]` -> a matrix for each, with "{}" in its name; `config[field]` of them."""

    def build(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
        for index, part in enumerate(_experts(stored[0], config[field])):
            yield name.format(index), View(part.shape, (part,))

    return build


def stacked_rows(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
    """Matrices under each other, `[sum of rows, columns]`."""
    columns = {_dims(tensor, 2)[1] for tensor in stored}
    if len(columns) != 1:
        raise _misshapen(stored[-1])
    shape = (sum(tensor.shape[0] for tensor in stored), columns.pop())
    yield name, View(shape, tuple(map(_all_of, stored)), _under_each_other)


def _under_each_other(parts: Parts) -> torch.Tensor:
    import torch

    return torch.cat(list(parts))


def gate_and_up(field: str, *, transposed: bool = False, alternating: bool = False) -> Build:
    """`[experts, width, hidden]` each, as `[experts, 2 width, hidden]` of both: gate rows before up rows, or in turns.

    `transposed`: as `[experts, hidden, 2 width]`. Filled expert by expert."""

    def build(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
        count = config[field]
        gate, up = (_experts(tensor, count) for tensor in stored)
        if stored[0].shape != stored[1].shape:
            raise _misshapen(stored[1])
        width, hidden = gate[0].shape
        shape = (count, hidden, 2 * width) if transposed else (count, 2 * width, hidden)
        first, second = _places(width, alternating)
        mixed = stored[0].dtype != stored[1].dtype

        def make(parts: Parts) -> torch.Tensor:
            import torch

            part = next(parts)
            out = part.new_empty(shape[1:], dtype=torch.float32 if mixed else None)
            rows = out.T if transposed else out
            rows[first], rows[second] = part, next(parts)
            return out

        order = (lambda: _in_turns(width)) if alternating else None
        slices = tuple(part for pair in zip(gate, up, strict=True) for part in pair)
        yield name, _stacked(shape, slices, ExpertParts(make, order))

    return build


def _in_turns(width: int) -> torch.Tensor:
    import torch

    return torch.arange(2 * width).view(2, width).T.flatten()


def alternating_biases(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
    """`[experts, width]` of gates and of ups -> `[experts, 2 width]` in turns."""
    experts, width = _dims(stored[0], 2)
    if stored[1].shape != stored[0].shape:
        raise _misshapen(stored[1])

    def make(parts: Parts) -> torch.Tensor:
        import torch

        return torch.stack(list(parts), dim=-1).reshape(experts, 2 * width)

    yield name, View((experts, 2 * width), tuple(map(_all_of, stored)), make)


def transposed_experts(field: str) -> Build:
    """`[experts, rows, columns]` as `[experts, columns, rows]`, expert by expert."""

    def build(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
        parts = _experts(stored[0], config[field])
        shape = (len(parts), *reversed(parts[0].shape))
        yield name, _stacked(shape, tuple(parts), ExpertParts(lambda read: next(read).T))

    return build


def latent_key_values(stored: Sequence[GgufEntry], config: Mapping[str, Any], name: str) -> Iterator[tuple[str, View]]:
    """Keys `[heads, latent, nope]` and values `[heads, dim, latent]` of multi-head latent attention, as the rows of one
    matrix `[heads * (nope + dim), latent]`."""
    heads, latent, nope = _dims(stored[0], 3)
    if stored[1].shape != (heads, config["v_head_dim"], latent):
        raise _misshapen(stored[1])
    shape = (heads * (nope + stored[1].shape[1]), latent)

    def make(parts: Parts) -> torch.Tensor:
        import torch

        keys, values = parts
        return torch.cat((keys.transpose(1, 2), values), dim=1).reshape(shape)

    yield name, View(shape, tuple(map(_all_of, stored)), make)


def _stacked(shape: tuple[int, ...], slices: tuple[Slice, ...], experts: ExpertParts) -> View:
    return View(shape, slices, lambda parts: experts.stack(parts, shape[0]), experts)


def _all_of(tensor: GgufEntry, heads: int = 0) -> Slice:
    return Slice(tensor.name, tensor.shape, 0, tensor.nbytes, heads)


def _experts(tensor: GgufEntry, count: int) -> list[Slice]:
    experts, rows, columns = _dims(tensor, 3)
    if experts != count:
        raise CorruptModel(f"tensor '{tensor.name}' holds {experts} experts, but its metadata says {count}")
    each = tensor.nbytes // experts
    return [Slice(tensor.name, (rows, columns), index * each, each) for index in range(experts)]


def _dims(tensor: GgufEntry, count: int) -> tuple[int, ...]:
    if len(tensor.shape) != count:
        raise _misshapen(tensor)
    return tensor.shape


def _places(width: int, alternating: bool) -> tuple[slice, slice]:
    if alternating:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, width), slice(width, None)


def _misshapen(tensor: GgufEntry) -> CorruptModel:
    return CorruptModel(f"tensor '{tensor.name}' has the shape {list(tensor.shape)}, which does not fit the others")
