"""The interface to a model's weights, independent of the file format.

Owns the `ModelSource` protocol, bounded reading of one file, and the fingerprint that peers compare before they
exchange hidden states.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from swarm.errors import CorruptModel, ModelNotFound
from swarm_kernels.models.config import ModelConfig

if TYPE_CHECKING:  # a client reads no tensor, and may have no torch
    import torch

    from swarm_kernels.ops.base.matrix import Matrix
    from swarm_kernels.ops.base.stored_weights import StoredWeights

HASHED_BYTES = 4096
"""Bytes of each sampled tensor that enter the fingerprint."""
HASHED_TENSORS = 64
"""Tensors whose bytes enter the fingerprint: as many small requests where the model lies on a hub."""

FetchProgress = Callable[[int, int], None]
"""Called with the bytes that are here and those that are needed; from other threads, one call at a time."""

_NUMBER = re.compile(r"\d+")
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

    def sliced(self, hf_name: str) -> Matrix:
        """As `tensor`, read part by part of its first dimension where the files allow that."""
        ...

    def nbytes(self, hf_name: str) -> int:
        """Bytes `tensor(hf_name)` takes in memory."""
        ...

    def native(self, hf_name: str) -> torch.dtype:
        """Of bf16, int8 and int4, the smallest that holds a matrix about as well as it is stored; CODES4 if it is in
        codes of 4 bits, which other groups of 4 bits hold less well, FLOAT8 if it is in E4M3, likewise."""
        ...

    def as_stored(self, hf_name: str, expert: int | None = None) -> StoredWeights | None:
        """A matrix as it is stored in 4 bits or E4M3, `[out, in]`, without another rounding; None where it must be
        rounded.

        `expert`: of a tensor that holds a layer's experts, by its first dimension. Raises CorruptModel.
        """
        ...

    def missing_bytes(self, names: Iterable[str]) -> int:
        """What `fetch` would transfer to have these tensors on this machine; 0 for a local model."""
        ...

    def fetch(self, names: Iterable[str], progress: FetchProgress | None = None) -> None:
        """Have these tensors on this machine before they are read; does nothing for those that are.

        What is read without it is fetched then. An exception of `progress` ends it; what has come is kept. Raises
        ModelNotFound, CorruptModel, DiskFull.
        """
        ...

    def close(self) -> None:
        """Close the files; tensors already returned stay valid."""
        ...


class NotQuantized(ABC):
    """The part of a ModelSource whose tensors are all stored as plain floats."""

    def native(self, hf_name: str) -> torch.dtype:
        import torch

        return torch.bfloat16

    def as_stored(self, hf_name: str, expert: int | None = None) -> StoredWeights | None:
        return None

    def sliced(self, hf_name: str) -> Matrix:
        return self.tensor(hf_name)

    @abstractmethod
    def tensor(self, hf_name: str) -> torch.Tensor: ...


class LocalFiles:
    """The part of a ModelSource whose tensors are all on this machine."""

    def missing_bytes(self, names: Iterable[str]) -> int:
        return 0

    def fetch(self, names: Iterable[str], progress: FetchProgress | None = None) -> None:
        """There is nothing to fetch."""


class WeightFile(Protocol):
    """Bounded reads of one file, wherever it lies."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """`length` bytes from `offset`, `[length]` uint8. Raises CorruptModel when the file ends before."""
        ...

    def close(self) -> None: ...


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
    """Hash of the canonical config, the tensor table and the first bytes of a sample of tensors; 32 hex digits.

    `table`: (name, shape, stored dtype, stored bytes) of each tensor; `read_start(name, n)` its first n stored bytes.
    Files, shards, paths and tokenizer settings are left out: they do not change what a layer computes.

    Equal fingerprints prove that config, names, shapes and number formats are equal, and that the sampled bytes are:
    at most `HASHED_TENSORS` tensors, some of every kind and spread over the layers. So it tells a model from one
    that was trained on, or into which an adapter was merged, when that changed all layers; not from one where only a
    few tensors differ. It is no proof of the weights: whoever serves a model may compute with others. Raises
    CorruptModel.
    """
    try:
        digest = hashlib.sha256(json.dumps(_canonical(config), sort_keys=True, default=str).encode())
    except RecursionError:
        raise CorruptModel("the model's config.json is nested too deep; fetch the model again") from None
    sizes = {}
    for name, shape, dtype, size in sorted(table):
        digest.update(json.dumps([name, list(shape), dtype]).encode())
        sizes[name] = size
    for name in fingerprint_sample(sizes):
        digest.update(read_start(name, min(sizes[name], HASHED_BYTES)).data)
    return digest.hexdigest()[:32]


def fingerprint_sample(names: Iterable[str]) -> list[str]:
    """The tensors whose bytes enter the fingerprint, a function of all names: the kinds of tensors (a name without its
    numbers) take turns, and each gives one of the layer that has given the fewest, ties by a hash of the name."""
    kinds: dict[str, list[tuple[bytes, str]]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("*", name), []).append((hashlib.sha256(name.encode()).digest(), name))
    pools = [heapq.nsmallest(HASHED_TENSORS, kinds[kind]) for kind in sorted(kinds)][:HASHED_TENSORS]
    given: dict[str, int] = {}
    sample: list[str] = []
    while pools and len(sample) < HASHED_TENSORS:
        for pool in pools[: HASHED_TENSORS - len(sample)]:
            chosen = min(pool, key=lambda entry: (given.get(_first_number(entry[1]), 0), entry[0]))
            pool.remove(chosen)
            layer = _first_number(chosen[1])
            given[layer] = given.get(layer, 0) + 1
            sample.append(chosen[1])
        pools = [pool for pool in pools if pool]
    return sample


def _first_number(name: str) -> str:
    """The layer, in most names."""
    match = _NUMBER.search(name)
    return match[0] if match else ""


def _canonical(config: ModelConfig) -> dict[str, Any]:
    fields = asdict(config)
    for name in ("eos_token_ids", "decoder", "beyond_fast_path", "layout"):  # the latter follow from the others
        del fields[name]
    fields["hf"] = {
        key: value
        for key, value in config.hf.items()
        if key not in _NOT_COMPUTATION and not key.startswith("_") and not key.endswith(("_token_id", "_dropout"))
    }
    return fields
