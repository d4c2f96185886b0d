"""Weights from a GGUF file, or from its parts, under Hugging Face names.

Owns the reading of what `gguf_types` says a tensor is made of, and the rows that llama.cpp orders otherwise. Tensors
are made of it by `gguf_types.tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from swarm.errors import CorruptModel
from swarm.extras import needs_torch
from swarm_kernels.models.gguf_config import gguf_model_config
from swarm_kernels.models.gguf_parts import GgufParts, LocatedTensor, unsplit_name
from swarm_kernels.models.gguf_types.rope import FREQS, LONG, SHORT
from swarm_kernels.models.gguf_types.views import Slice, View
from swarm_kernels.models.source import LocalFiles, ModelFile, fingerprint
from swarm_kernels.models.tensor_shapes import check_shapes

if TYPE_CHECKING:
    import torch

    from swarm_kernels.models.gguf_types.tensors import GgufTensors
    from swarm_kernels.ops.base.matrix import Matrix
    from swarm_kernels.ops.base.stored_weights import StoredWeights

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
        return self._tensors.nbytes(self._find(hf_name))

    def tensor(self, hf_name: str) -> torch.Tensor:
        return self._tensors.tensor(self._find(hf_name))

    def sliced(self, hf_name: str) -> Matrix:
        return self._tensors.sliced(self._find(hf_name))

    def native(self, hf_name: str) -> torch.dtype:
        return self._tensors.native(self._find(hf_name))

    def as_stored(self, hf_name: str, expert: int | None = None) -> StoredWeights | None:
        return self._tensors.as_stored(self._find(hf_name), expert)

    @cached_property
    def _tensors(self) -> GgufTensors:
        """Imported when the first tensor is asked for: a client reads headers alone, and may have no torch."""
        needs_torch("a model's tensor")
        from swarm_kernels.models.gguf_types.tensors import GgufTensors

        return GgufTensors(lambda part: self._located(part).entry.ggml_type, self._stored)

    def close(self) -> None:
        self._parts.close()

    def _find(self, hf_name: str) -> View:
        try:
            return self._views[hf_name]
        except KeyError:
            raise CorruptModel(f"{self.path} has no tensor '{hf_name}'") from None

    def _located(self, part: Slice) -> LocatedTensor:
        return self._parts.tensors[part.tensor]

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
