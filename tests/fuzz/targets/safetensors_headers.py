"""Headers of safetensors files and the cards of drafts in them: read, or a ModelError."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from model_bytes import MemoryFile
from safetensors.torch import save

from swarm.errors import ModelError
from swarm_kernels.models.safetensors import read_header, read_metadata, read_tensor

INSTRUMENT = ("swarm_kernels.models",)


def run(data: bytes) -> None:
    """`data`: a file, and the JSON of a header before four bytes of values."""
    for whole in (data, len(data).to_bytes(8, "little") + data + bytes(4)):
        file = MemoryFile(whole)
        try:
            read_metadata(file)
            for name, stored in read_header(file).items():
                assert tuple(read_tensor(stored, name).shape) == stored.shape
        except ModelError:
            continue


def seeds() -> Iterator[bytes]:
    yield save({"a.b": torch.zeros(2, 3), "c": torch.zeros(4, dtype=torch.int8)}, {"format": "x", "card": "{}"})
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    yield msgspec.json.encode({"__metadata__": {"shape": "x"}, "a": entry})
    yield msgspec.json.encode({"a": {**entry, "shape": [0, 1 << 49]}, "b": {**entry, "dtype": "F8_E4M3"}})
