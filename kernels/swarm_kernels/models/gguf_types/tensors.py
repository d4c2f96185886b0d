"""The tensors of a GGUF file: what its stored bytes become. Owns which number format that is; reads by a function that
it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from swarm_kernels.device.device import CODES4
from swarm_kernels.models.gguf_types.blocks import QUANT_BLOCKS
from swarm_kernels.models.gguf_types.dequant import dequantize, dequantized_dtype, native_format
from swarm_kernels.models.gguf_types.four_bits import GGUF_FOUR_BITS, four_bits_from_gguf
from swarm_kernels.models.gguf_types.views import Slice, View
from swarm_kernels.ops.base.matrix import Matrix, ReadByParts
from swarm_kernels.ops.base.stored_weights import StoredWeights, stacked


class GgufTensors:
    """A `ModelSource`'s methods of these names, of a view."""

    def __init__(self, type_of: Callable[[Slice], int], read: Callable[[Slice], npt.NDArray[np.uint8]]) -> None:
        """`type_of`: ggml's type of a slice. `read`: its bytes, in Hugging Face's order of rows."""
        self._type_of = type_of
        self._read = read

    def nbytes(self, view: View) -> int:
        return math.prod(view.shape) * self._dtype(view).itemsize

    def tensor(self, view: View) -> torch.Tensor:
        parts = (self._dequantized(part) for part in view.slices)
        return view.make(parts) if view.make else next(parts)

    def sliced(self, view: View) -> Matrix:
        shape, dtype, experts = torch.Size(view.shape), self._dtype(view), view.experts
        if experts is not None:

            def read_experts(start: int, stop: int) -> torch.Tensor:
                slices = view.expert_slices(start, stop)
                return experts.stack(map(self._dequantized, slices), stop - start)

            return ReadByParts(shape, dtype, read_experts)
        part = view.slices[0]
        if not view.is_stored or part.heads or len(shape) < 2:
            return self.tensor(view)
        return ReadByParts(shape, dtype, lambda start, stop: self._dequantized(part.rows(start, stop)))

    def native(self, view: View) -> torch.dtype:
        found = native_format(self._type_of(view.slices[0]))
        return torch.int8 if found == CODES4 and not (view.is_stored or view.experts) else found

    def as_stored(self, view: View, expert: int | None) -> StoredWeights | None:
        if (expert is not None) != (view.experts is not None) or not (view.is_stored or view.experts):
            return None
        slices = view.slices if expert is None else view.expert_slices(expert, expert + 1)
        parts = [self._four_bits(part) for part in slices]
        found = stacked([part for part in parts if part is not None]) if None not in parts else None
        if found is None or view.experts is None or view.experts.order is None:
            return found
        return found.rows(view.experts.order())

    def _dtype(self, view: View) -> torch.dtype:
        """Of the tensor."""
        dtypes = {dequantized_dtype(self._type_of(part)) for part in view.slices}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _four_bits(self, part: Slice) -> StoredWeights | None:
        kind = self._type_of(part)
        if QUANT_BLOCKS[kind][0] not in GGUF_FOUR_BITS:
            return None
        return four_bits_from_gguf(self._read(part), kind, part.shape)

    def _dequantized(self, part: Slice) -> torch.Tensor:
        return dequantize(self._read(part), self._type_of(part), part.shape)
