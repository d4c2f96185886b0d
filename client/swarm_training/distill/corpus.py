"""The chats a model wrote, with the teacher's likeliest tokens at every position, in shards on disk.

Owns the file format: safetensors, some chats per shard, each shard complete or absent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from swarm.errors import CorruptModel

TOP = 16
"""Tokens of the teacher kept per position."""

_COLUMNS = ("tokens", "origin", "top_ids", "top_logprobs", "taps")

GIVEN, USER, ANSWER = 0, 1, 2
"""Origin of a token: the template, or the model as the user or as the assistant."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedChat:
    """`n` tokens and, for each, the teacher's prediction there; rows of GIVEN tokens are zero."""

    tokens: torch.Tensor  # [n] int32
    origin: torch.Tensor  # [n] uint8
    top_ids: torch.Tensor  # [n, TOP] int32, likeliest first
    top_logprobs: torch.Tensor  # [n, TOP] fp16
    taps: torch.Tensor  # [n, bytes] uint8: hidden states as hops send them (`tap_rows`), [n, 0] without

    def __len__(self) -> int:
        return self.tokens.shape[0]


class Corpus:
    """A folder of shards written by one model. `weight_hash`: of that model; chats of another one are rejected."""

    def __init__(self, folder: Path, weight_hash: str) -> None:
        """Raises CorruptModel when the folder holds another model's chats."""
        self.folder = folder
        self._hash = weight_hash
        folder.mkdir(parents=True, exist_ok=True)
        self.tokens = self.chats = 0
        self._paths = sorted(folder.glob("chats-*.safetensors"))
        for path in self._paths:
            self._count(_metadata(path), path)

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._paths)

    def append(self, chats: Sequence[RecordedChat], taps: Sequence[int] = ()) -> None:
        """Write one more shard; it is on disk when this returns. `taps`: the layers whose states the chats hold."""
        sizes = torch.tensor([len(chat) for chat in chats], dtype=torch.int64)
        tensors = {"sizes": sizes}
        for name in _COLUMNS:
            tensors[name] = torch.cat([getattr(chat, name) for chat in chats])
        metadata = {"model": self._hash, "tokens": str(int(sizes.sum())), "chats": str(len(chats))}
        metadata["taps"] = ",".join(map(str, taps))
        path = self.folder / f"chats-{len(self._paths):05d}.safetensors"
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata)
        os.replace(part, path)
        self._paths.append(path)
        self._count(metadata, path)

    def read(self, first: int = 0) -> Iterator[RecordedChat]:
        """The chats of shard `first` and all later ones, in the order they were written. Raises CorruptModel."""
        for number in range(first, len(self)):
            yield from self.shard(number)

    def shard(self, number: int) -> Iterator[RecordedChat]:
        """The chats of one shard, in the order they were written. Raises CorruptModel."""
        path = self._paths[number]
        try:
            shard = load_file(path)
        except (OSError, SafetensorError):
            raise CorruptModel(f"{path} cannot be read; remove it") from None
        sizes = shard["sizes"].tolist()
        shard.setdefault("taps", torch.zeros(sum(sizes), 0, dtype=torch.uint8))
        columns = [torch.split(shard[name], sizes) for name in _COLUMNS]
        for parts in zip(*columns, strict=True):
            yield RecordedChat(*parts)

    def taps(self, number: int) -> tuple[int, ...]:
        """The layers whose states shard `number` holds. Raises CorruptModel."""
        layers = _metadata(self._paths[number]).get("taps", "")
        try:
            return tuple(int(layer) for layer in layers.split(",") if layer)
        except ValueError:
            raise CorruptModel(f"{self._paths[number]} is not a shard of chats; remove it") from None

    def _count(self, metadata: dict[str, str], path: Path) -> None:
        if metadata.get("model") != self._hash:
            raise CorruptModel(f"{path} was written by another model; give another --work folder")
        self.tokens += int(metadata.get("tokens", "0"))
        self.chats += int(metadata.get("chats", "0"))


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        raise CorruptModel(f"{path} is not a shard of chats; remove it") from None
