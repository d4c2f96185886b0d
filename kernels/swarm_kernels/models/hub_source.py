"""A model on a hub whose weights are fetched when they are needed: the table first, by small reads, then some shards.

Owns when a shard is fetched, and that what was read of it before is what was fetched. Fetching itself is in `hub`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm.errors import CorruptModel
from swarm_kernels.models.hub.failures import told
from swarm_kernels.models.hub.repo import HubRepo
from swarm_kernels.models.safetensors import MAX_HEADER, SafetensorsSource, StoredTensor
from swarm_kernels.models.source import HASHED_BYTES, FetchProgress, ModelFile

_HEAD_BYTES = 1 << 16  # read at once: of nearly all shards, the whole header
_MAX_HEADS = 1 << 28  # of all headers of a model, bytes


class HubFile:
    """One weight file of a repository. Its header is known from the start; reading its data fetches the file."""

    def __init__(self, repo: HubRepo, name: str, head: bytes) -> None:
        """`head`: the length of the header, and the header."""
        self.path = repo.folder / name
        self.size = repo.listing.find(name).size
        self._repo = repo
        self._head = head
        self._file: ModelFile | None = None
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """See `WeightFile.read`. Raises ModelNotFound, CorruptModel, DiskFull."""
        if offset >= 0 and length >= 0 and offset + length <= len(self._head):
            return np.frombuffer(bytearray(self._head[offset : offset + length]), dtype=np.uint8)
        return self._fetched().read(offset, length)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _fetched(self) -> ModelFile:
        with self._lock:
            if self._file is None:
                self._repo.fetch([self.path.name])
                file = ModelFile(self.path)
                if file.size != self.size or file.read(0, len(self._head)).tobytes() != self._head:
                    file.close()
                    self._repo.cache.forget_pieces(self._repo.listing.commit)
                    raise CorruptModel(f"the header of {self.path} is not the one that the hub showed; run again")
                self._file = file
            return self._file


class HubSource(SafetensorsSource):
    """A ModelSource. Opening reads the headers and some starts of tensors by range, and keeps them for the next time.

    `repo.folder` must hold the model's JSON files.
    """

    def __init__(self, repo: HubRepo) -> None:
        """Raises ModelNotFound, CorruptModel, UnsupportedModel."""
        self.repo = repo
        self._pieces = repo.cache.kept_pieces(repo.listing.commit)
        self._changed = False
        super().__init__(repo.folder, repo.listing.repo)
        if self._changed:
            with told(repo.listing.repo, repo.cache.folder):
                repo.cache.keep_pieces(repo.listing.commit, self._pieces)
        del self._pieces

    def missing_bytes(self, names: Iterable[str]) -> int:
        return self.repo.missing_bytes(self.shards(names))

    def fetch(self, names: Iterable[str], progress: FetchProgress | None = None) -> None:
        self.repo.fetch(self.shards(names), progress)

    def shards(self, names: Iterable[str]) -> set[str]:
        """The files that hold these tensors. Raises CorruptModel."""
        return {stored.file.path.name for name in names for stored in self.stored(name)}

    def _safetensors(self) -> list[Path]:
        return [self.path / name for name in self.repo.listing.with_suffix(".safetensors")]

    def _file(self, path: Path) -> HubFile:
        self._before_headers([path.name])
        return HubFile(self.repo, path.name, self._pieces.heads[path.name])

    def _before_headers(self, shards: Sequence[str]) -> None:
        """Read the headers of these files that are not known."""
        unknown = [name for name in shards if not self._is_head(name)]
        if not unknown:
            return
        self._changed = True
        sizes = {name: self.repo.listing.find(name).size for name in unknown}
        firsts = self._read([(name, 0, min(_HEAD_BYTES, sizes[name])) for name in unknown])
        rest: list[tuple[str, int, int]] = []
        total = sum(map(len, self._pieces.heads.values()))
        for name, first in zip(unknown, firsts, strict=True):
            length = _head_length(first)
            total += length
            if length > sizes[name] or length > MAX_HEADER + 8 or total > _MAX_HEADS:
                raise CorruptModel(f"the header of {name} of {self.name} is malformed or too large; it cannot be read")
            self._pieces.heads[name] = first[:length]
            if length > len(first):
                rest.append((name, len(first), length - len(first)))
        for (name, _, _), data in zip(rest, self._read(rest), strict=True):
            self._pieces.heads[name] += data

    def _is_head(self, name: str) -> bool:
        head = self._pieces.heads.get(name, b"")
        return len(head) >= 8 and _head_length(head) == len(head)

    def _before_starts(self, names: Sequence[str]) -> None:
        """Read the starts of these tensors that are not known."""
        wanted = [(name, self._tensors[name]) for name in names]
        unknown = [(name, t) for name, t in wanted if len(self._pieces.starts.get(name, b"")) != _start_length(t)]
        if not unknown:
            return
        self._changed = True
        found = self._read([(t.file.path.name, t.offset, _start_length(t)) for _, t in unknown])
        self._pieces.starts |= {name: data for (name, _), data in zip(unknown, found, strict=True)}

    def _start(self, name: str, length: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._pieces.starts[name][:length], dtype=np.uint8)

    def _read(self, pieces: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """(file, offset, length) -> bytes: from the file if it is here, else by range."""
        here = {name for name, _, _ in pieces if self.repo.is_here(name)}
        remote = iter(self.repo.read_many([piece for piece in pieces if piece[0] not in here]))
        return [self._read_local(*piece) if piece[0] in here else next(remote) for piece in pieces]

    def _read_local(self, name: str, offset: int, length: int) -> bytes:
        file = ModelFile(self.path / name)
        try:
            return file.read(offset, length).tobytes()
        finally:
            file.close()


def _head_length(head: bytes) -> int:
    """Bytes of the header and of the length before it."""
    return 8 + int(struct.unpack_from("<Q", head.ljust(8, b"\xff"))[0])


def _start_length(tensor: StoredTensor) -> int:
    return min(tensor.nbytes, HASHED_BYTES)
