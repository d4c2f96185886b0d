"""Random weights in a model's shapes: to time its layers before any of them is fetched.

How long a layer takes depends on its shapes, not on its values, but for the experts that rows choose: at random here.
Owns no choice of when that is good enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from swarm_kernels.device.device import FLOAT8
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import LocalFiles, ModelSource
from swarm_kernels.ops.base.fp8_linear import GROUP_SIZE, Fp8Weights

_PATTERN = 1 << 20  # values that are drawn, and repeated: drawing all would take longer than timing
_DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}


class RandomWeights(LocalFiles):
    """A ModelSource with the names and shapes of `model`. Nothing of the weights is read."""

    def __init__(self, model: ModelSource) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(1)
        self._values = torch.randn(_PATTERN, generator=generator) * 0.02

    @staticmethod
    def can_stand_for(model: ModelSource, names: Iterable[str]) -> bool:
        """Whether these tensors are plain numbers; the parts of quantized weights depend on each other."""
        return all(_itemsize(model, name) in _DTYPES for name in names)

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def path(self) -> Path:
        return self._model.path

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def weight_hash(self) -> str:
        return self._model.weight_hash

    def names(self) -> tuple[str, ...]:
        return self._model.names()

    def has(self, hf_name: str) -> bool:
        return self._model.has(hf_name)

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._model.shape(hf_name)

    def nbytes(self, hf_name: str) -> int:
        return self._model.nbytes(hf_name)

    def tensor(self, hf_name: str) -> torch.Tensor:
        shape = self.shape(hf_name)
        count = math.prod(shape)
        dtype = _DTYPES.get(_itemsize(self._model, hf_name), torch.float32)
        values = self._values.to(dtype).repeat(-(-count // _PATTERN))[:count].view(shape)
        # Norms of nearly 0 would leave routers to their biases, and all rows to the same experts.
        return values + 1 if len(shape) == 1 and "norm" in hf_name else values

    def native(self, hf_name: str) -> torch.dtype:
        return self._model.native(hf_name)

    def sliced(self, hf_name: str) -> torch.Tensor:
        return self.tensor(hf_name)

    def as_stored(self, hf_name: str, expert: int | None = None) -> Fp8Weights | None:
        """Those of 4 bits are rounded; E4M3 is multiplied in another way than what would be rounded to 8 bits."""
        if self._model.native(hf_name) != FLOAT8 or expert is not None:
            return None
        weight = self.tensor(hf_name)
        groups = -(-weight.shape[1] // GROUP_SIZE)
        return Fp8Weights(weight.to(FLOAT8).view(torch.uint8), torch.ones(len(weight), groups))

    def close(self) -> None:
        """Does nothing: the caller owns the model."""


def _itemsize(model: ModelSource, name: str) -> int:
    return model.nbytes(name) // max(1, math.prod(model.shape(name)))
