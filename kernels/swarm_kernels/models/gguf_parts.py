"""The files of one GGUF model: itself, or its parts (`name-00001-of-00003.gguf`, as llama-gguf-split writes them).

Owns the names of parts and the checks that they belong together. The first part has the model's metadata.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import CorruptModel, ModelNotFound
from swarm_kernels.models.gguf_header import GgufHeader, GgufTensor
from swarm_kernels.models.source import ModelFile

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_MAX_PARTS = 1024  # each is an open file


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor, and the file that it lies in."""

    file: ModelFile
    entry: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape


class GgufParts:
    """The open files of a model, its metadata (`header`) and the tensors of all parts, by llama.cpp's names."""

    def __init__(self, path: Path) -> None:
        """`path`: the file, or any part. Raises ModelNotFound, CorruptModel, UnsupportedModel."""
        self.files: list[ModelFile] = []
        self.tensors: dict[str, LocatedTensor] = {}
        try:
            self.header = self._add(path)
            count = self.header.integer("split.count", 1) or 1
            if count > 1:
                self.close()
                self.files, self.tensors = [], {}
                self.header = self._add_parts(path, count)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _add_parts(self, named: Path, count: int) -> GgufHeader:
        """-> the first part's header."""
        match = _PART.fullmatch(named.stem)
        if not 1 < count <= _MAX_PARTS or match is None or int(match[3]) != count:
            raise CorruptModel(
                f"{named} says that it is one of {count} parts, but is not named as one; "
                f"name them {named.stem.split('-00')[0]}-00001-of-{count % 100000:05d}.gguf and so on"
            )
        paths = [named.with_name(f"{match[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelNotFound(f"{missing[0]}{more} of the {count} parts is missing from {named.parent}; fetch it too")
        headers = [self._add(path) for path in paths]
        for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
            if header.integer("split.no") != number or header.integer("split.count") != count:
                raise CorruptModel(f"{path} is not part {number + 1} of {count} as its name says; fetch it again")
        stated = headers[0].integer("split.tensors.count")
        if stated is not None and stated != len(self.tensors):
            raise CorruptModel(f"the parts of {named} hold {len(self.tensors)} tensors, not {stated}; fetch again")
        headers[0].tensors = {name: tensor.entry for name, tensor in self.tensors.items()}  # the config asks for names
        return headers[0]

    def _add(self, path: Path) -> GgufHeader:
        file = ModelFile(path)
        self.files.append(file)
        header = GgufHeader(file)
        for name, tensor in header.tensors.items():
            if name in self.tensors:
                raise CorruptModel(f"tensor '{name}' is in two parts, {self.tensors[name].file.path} and {path}")
            self.tensors[name] = LocatedTensor(file, tensor)
        return header


def unsplit_name(path: Path) -> str:
    """The name of the model that a file is a part of: its own stem if it is none."""
    match = _PART.fullmatch(path.stem)
    return match[1] if match else path.stem
