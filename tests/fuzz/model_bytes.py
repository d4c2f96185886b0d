"""A model file in memory: what `ModelFile` is on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm.errors import CorruptModel
from swarm_kernels.models.source import ModelFile


class MemoryFile(ModelFile):
    def __init__(self, data: bytes) -> None:
        self.path = Path("model")
        self.size = len(data)
        self.bytes_read = 0
        self._content = data

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CorruptModel("it is cut short")
        return np.frombuffer(self._content[offset : offset + length], dtype=np.uint8).copy()

    def close(self) -> None:
        pass
