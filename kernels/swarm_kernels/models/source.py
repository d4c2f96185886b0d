"""The interface to a model's weights, independent of the file format.

Owns the `ModelSource` protocol, bounded reading of one file, and the fingerprint that peers compare before they
exchange hidden states.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import CorruptModel, ModelNotFound
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.ops.base.int4_linear import FourBitWeights

HASHED_BYTES = 4096
"""Bytes of each tensor that enter the fingerprint: enough to distinguish fine-tunes, and quick to read."""

_NOT_COMPUTATION = frozenset(
    {
        "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
        "pretraining_tp", "auto_map", "max_length", "rope_theta", "rope_scaling", "rope_parameters",
    }
)  # fmt: skip


class ModelSource(Protocol):
    """Tensors of one model under Hugging Face's Llama-style names, read one at a time. Safe in many threads."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path:
        """The file or folder it reads."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def weight_hash(self) -> str:
        """32 hex digits; the same for the same weights wherever they are stored. A fingerprint, not a proof."""
        ...

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        ...

    def has(self, hf_name: str) -> bool: ...

    def shape(self, hf_name: str) -> tuple[int, ...]: ...

    def tensor(self, hf_name: str) -> torch.Tensor:
        """A fresh CPU tensor, `[out, in]` for linear weights; quantized ones as fp32. Raises CorruptModel."""
        ...

    def nbytes(self, hf_name: str) -> int:
        """Bytes `tensor(hf_name)` takes in memory."""
        ...

    def native(self, hf_name: str) -> torch.dtype:
        """Of bf16, int8 and int4, the smallest that holds a matrix about as well as it is stored."""
        ...

    def four_bits(self, hf_name: str) -> FourBitWeights | None:
        """A matrix whose `native` is int4 as it is stored, without another rounding; None where it must be rounded.

        Raises CorruptModel.
        """
        ...

    def close(self) -> None:
        """Close the files; tensors already returned stay valid."""
        ...


class NotQuantized:
    """The part of a ModelSource whose tensors are all stored as plain floats."""

    def native(self, hf_name: str) -> torch.dtype:
        return torch.bfloat16

    def four_bits(self, hf_name: str) -> FourBitWeights | None:
        return None


class ModelFile:
    """Bounded reads of one open file. `bytes_read` counts them, for tests.

    Plain reads rather than a memory map: a file that shrinks while a node runs is then an error and not a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._lock = threading.Lock()
        try:
            self._file = path.open("rb", buffering=0)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ModelNotFound(f"cannot read the model file {path}: {error.strerror}") from None

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """`length` bytes from `offset`, `[length]` uint8. Raises CorruptModel when the file ends before."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CorruptModel(f"{self.path} is truncated: it has {self.size} bytes, {offset + length} are needed")
        buffer = np.empty(length, dtype=np.uint8)
        view = memoryview(buffer.data)
        filled = 0
        try:
            with self._lock:
                self._file.seek(offset)
                while filled < length:
                    count = self._file.readinto(view[filled:])
                    if not count:
                        raise CorruptModel(f"{self.path} was cut short while it was being read; fetch it again")
                    filled += count
                self.bytes_read += length
        except OSError as error:
            raise CorruptModel(f"cannot read {self.path}: {error.strerror}; fetch it again") from None
        return buffer

    def close(self) -> None:
        with self._lock:
            self._file.close()


def fingerprint(
    config: ModelConfig,
    table: Iterable[tuple[str, tuple[int, ...], str, int]],
    read_start: Callable[[str, int], npt.NDArray[np.uint8]],
) -> str:
    """Hash of the canonical config, the tensor table and each tensor's first bytes; 32 hex digits.

    `table`: (name, shape, stored dtype, stored bytes) of each tensor; `read_start(name, n)` its first n stored bytes.
    Files, shards, paths and tokenizer settings are left out: they do not change what a layer computes. Raises
    CorruptModel.
    """
    try:
        digest = hashlib.sha256(json.dumps(_canonical(config), sort_keys=True, default=str).encode())
    except RecursionError:
        raise CorruptModel("the model's config.json is nested too deep; fetch the model again") from None
    for name, shape, dtype, size in sorted(table):
        digest.update(json.dumps([name, list(shape), dtype]).encode())
        digest.update(read_start(name, min(size, HASHED_BYTES)).data)
    return digest.hexdigest()[:32]


def _canonical(config: ModelConfig) -> dict[str, Any]:
    fields = asdict(config)
    del fields["eos_token_ids"]
    fields["hf"] = {
        key: value
        for key, value in config.hf.items()
        if key not in _NOT_COMPUTATION and not key.startswith("_") and not key.endswith(("_token_id", "_dropout"))
    }
    return fields
