"""Weights from a GGUF file, or from its parts, under Hugging Face names.

Owns the reading of what `gguf_types` says a tensor is made of, and the rows that llama.cpp orders otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import CorruptModel
from swarm_kernels.device.device import CODES4
from swarm_kernels.models.gguf_config import gguf_model_config
from swarm_kernels.models.gguf_dequant import dequantize, dequantized_dtype, native_format
from swarm_kernels.models.gguf_four_bits import GGUF_FOUR_BITS, four_bits_from_gguf
from swarm_kernels.models.gguf_parts import GgufParts, LocatedTensor, unsplit_name
from swarm_kernels.models.gguf_types.rope import FREQS, LONG, SHORT
from swarm_kernels.models.gguf_types.views import Slice, View
from swarm_kernels.models.source import LocalFiles, ModelFile, fingerprint
from swarm_kernels.models.tensor_shapes import check_shapes
from swarm_kernels.ops.base.matrix import Matrix, ReadByParts
from swarm_kernels.ops.base.stored_weights import StoredWeights, stacked

_MAX_FACTORS = 1 << 12  # one for each pair of a head's dimensions


class GgufSource(LocalFiles):
    """A ModelSource. Opening reads only the headers and the first 4 KiB of some tensors."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """`path`: the file, or any part. Raises ModelNotFound, CorruptModel, UnsupportedModel."""
        self.path = path
        self.name = name or unsplit_name(path)
        self._parts = GgufParts(path)
        self.header = self._parts.header  # of the first part: the metadata
        try:
            factors = rope_factors(self._parts.tensors, str(path))
            self.config, architecture = gguf_model_config(self.header, factors, str(path))
            self._views = architecture.views(self.header.tensors, self.config.hf, str(path))
            check_shapes(self.config, self._views, str(path))
            self.weight_hash = fingerprint(
                self.config,
                [(name, view.shape, *self._stored_as(view)) for name, view in self._views.items()],
                lambda name, length: self._start(self._views[name], length),
            )
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> list[ModelFile]:
        """The file, or its parts in order."""
        return self._parts.files

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._views))

    def has(self, hf_name: str) -> bool:
        return hf_name in self._views

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._find(hf_name).shape

    def nbytes(self, hf_name: str) -> int:
        view = self._find(hf_name)
        return math.prod(view.shape) * self._dtype(view).itemsize

    def tensor(self, hf_name: str) -> torch.Tensor:
        view = self._find(hf_name)
        parts = (self._dequantized(part) for part in view.slices)
        return view.make(parts) if view.make else next(parts)

    def sliced(self, hf_name: str) -> Matrix:
        view = self._find(hf_name)
        shape, dtype, experts = torch.Size(view.shape), self._dtype(view), view.experts
        if experts is not None:

            def read_experts(start: int, stop: int) -> torch.Tensor:
                slices = view.expert_slices(start, stop)
                return experts.stack(map(self._dequantized, slices), stop - start)

            return ReadByParts(shape, dtype, read_experts)
        part = view.slices[0]
        if not view.is_stored or part.heads or len(shape) < 2:
            return self.tensor(hf_name)
        return ReadByParts(shape, dtype, lambda start, stop: self._dequantized(part.rows(start, stop)))

    def native(self, hf_name: str) -> torch.dtype:
        view = self._find(hf_name)
        found = native_format(self._located(view.slices[0]).entry.ggml_type)
        return torch.int8 if found == CODES4 and not (view.is_stored or view.experts) else found

    def as_stored(self, hf_name: str, expert: int | None = None) -> StoredWeights | None:
        view = self._find(hf_name)
        if (expert is not None) != (view.experts is not None) or not (view.is_stored or view.experts):
            return None
        slices = view.slices if expert is None else view.expert_slices(expert, expert + 1)
        parts = [self._four_bits(part) for part in slices]
        found = stacked([part for part in parts if part is not None]) if None not in parts else None
        if found is None or view.experts is None or view.experts.order is None:
            return found
        return found.rows(view.experts.order())

    def close(self) -> None:
        self._parts.close()

    def _find(self, hf_name: str) -> View:
        try:
            return self._views[hf_name]
        except KeyError:
            raise CorruptModel(f"{self.path} has no tensor '{hf_name}'") from None

    def _located(self, part: Slice) -> LocatedTensor:
        return self._parts.tensors[part.tensor]

    def _dtype(self, view: View) -> torch.dtype:
        """Of the tensor."""
        dtypes = {dequantized_dtype(self._located(part).entry.ggml_type) for part in view.slices}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _four_bits(self, part: Slice) -> StoredWeights | None:
        entry = self._located(part).entry
        if entry.dtype not in GGUF_FOUR_BITS:
            return None
        return four_bits_from_gguf(self._stored(part), entry.ggml_type, part.shape)

    def _dequantized(self, part: Slice) -> torch.Tensor:
        return dequantize(self._stored(part), self._located(part).entry.ggml_type, part.shape)

    def _stored(self, part: Slice) -> npt.NDArray[np.uint8]:
        """Its bytes, in Hugging Face's order of rows."""
        found = self._located(part)
        stored = found.file.read(found.entry.offset + part.offset, part.nbytes)
        return _unpermute(stored, part.shape[0], part.heads) if part.heads else stored

    def _stored_as(self, view: View) -> tuple[str, int]:
        """The types and the bytes of its slices, for the fingerprint."""
        types = sorted({self._located(part).entry.dtype for part in view.slices})
        return "+".join(types), sum(part.nbytes for part in view.slices)

    def _start(self, view: View, length: int) -> npt.NDArray[np.uint8]:
        first = view.slices[0]
        found = self._located(first)
        return found.file.read(found.entry.offset + first.offset, min(length, first.nbytes))


def rope_factors(tensors: Mapping[str, LocatedTensor], where: str) -> dict[str, tuple[float, ...]]:
    """The tensors that scale the rotary embedding. Raises CorruptModel."""
    factors = {}
    for name in (FREQS, LONG, SHORT):
        found = tensors.get(name)
        if found is None:
            continue
        tensor = found.entry
        if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
            raise CorruptModel(f"{where}: '{name}' is not a short row of fp32 numbers")
        values: list[float] = found.file.read(tensor.offset, tensor.nbytes).view(np.float32).tolist()
        factors[name] = tuple(values)
    return factors


def _unpermute(stored: npt.NDArray[np.uint8], rows: int, heads: int) -> npt.NDArray[np.uint8]:
    """Put the rows of a query or key projection back in Hugging Face's order.

    llama.cpp interleaves the two halves of each head, since its rotary embedding rotates neighboring values;
    `rotate_half` rotates the halves. Whole rows move, so stored bytes do: `[heads, dim / 2, 2, bytes]` -> `[heads, 2,
    dim / 2, bytes]`."""
    pairs = stored.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
