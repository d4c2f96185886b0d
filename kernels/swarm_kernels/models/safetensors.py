"""Weights from a Hugging Face folder: one safetensors file or an indexed set of shards.

Owns the safetensors container (https://github.com/huggingface/safetensors, "Format") and the folder's layout. Reads
only `*.safetensors` and `*.json`: pickle files (`*.bin`, `*.pt`) are refused, as loading one can run any code.
The library's `safe_open` is not used: it maps the file into memory, and a file that shrinks then kills the process.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from swarm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.source import ModelFile, fingerprint
from swarm_kernels.models.tensor_shapes import check_shapes

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_SIZES = {**{name: dtype.itemsize for name, dtype in _DTYPES.items()}, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_SIZES |= {"U16": 2, "U32": 4, "U64": 8}
_MAX_HEADER = 100_000_000  # as the reference implementation
_MAX_JSON = 1 << 28
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: ModelFile
    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the file's start
    nbytes: int


class SafetensorsSource:
    """A ModelSource. Opening reads only the headers and the first 4 KiB of each tensor."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Raises ModelNotFound, CorruptModel, UnsupportedModel."""
        self.path = folder
        self.name = name or folder.resolve().name
        self.files: list[ModelFile] = []
        try:
            self._tensors = self._read_tables()
            self.config: ModelConfig = model_config(
                read_json(folder / "config.json"),
                read_json(folder / "generation_config.json", required=False),
                has_head=self.has("lm_head.weight"),
                where=str(folder / "config.json"),
            )
            check_shapes(self.config, self._tensors, str(folder))
            self.weight_hash = fingerprint(
                self.config,
                [(name, t.shape, t.dtype, t.nbytes) for name, t in self._tensors.items()],
                lambda name, length: self._tensors[name].file.read(self._tensors[name].offset, length),
            )
        except BaseException:
            self.close()
            raise

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def has(self, hf_name: str) -> bool:
        return hf_name in self._tensors

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._find(hf_name).shape

    def nbytes(self, hf_name: str) -> int:
        return self._find(hf_name).nbytes

    def tensor(self, hf_name: str) -> torch.Tensor:
        found = self._find(hf_name)
        if found.dtype not in _DTYPES:
            raise UnsupportedModel(f"{found.file.path}: '{hf_name}' is stored as {found.dtype}, which is not read")
        stored = torch.from_numpy(found.file.read(found.offset, found.nbytes))
        return stored.view(_DTYPES[found.dtype]).reshape(found.shape)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _find(self, hf_name: str) -> _Tensor:
        try:
            return self._tensors[hf_name]
        except KeyError:
            raise CorruptModel(f"{self.path} has no tensor '{hf_name}'") from None

    def _read_tables(self) -> dict[str, _Tensor]:
        index = self.path / INDEX
        if not index.is_file():
            return self._open(self._single_file())
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptModel(f"{index} has no weight_map; fetch it again")
        weight_map = {name: str(shard) for name, shard in weight_map.items()}
        shards = {shard: self._open(self._shard(index, shard)) for shard in sorted(set(weight_map.values()))}
        tensors = {}
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                raise CorruptModel(
                    f"{index} places {name[:80]!r} in {shard[:80]!r}, but it is not there; fetch the model again"
                )
            tensors[name] = shards[shard][name]
        return tensors

    def _single_file(self) -> Path:
        usual = self.path / "model.safetensors"
        found = [usual] if usual.is_file() else sorted(self.path.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        if found:
            raise ModelNotFound(f"{self.path} has {len(found)} safetensors files but no {INDEX} to join them; fetch it")
        if any(entry.suffix in _PICKLES for entry in self.path.iterdir()):
            raise UnsupportedModel(
                f"{self.path} has only pickle files (*.bin, *.pt), which are never loaded because they can run any "
                "code; use the model's safetensors files or a GGUF file"
            )
        raise ModelNotFound(f"{self.path} has no *.safetensors file")

    def _shard(self, index: Path, shard: str) -> Path:
        if not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise CorruptModel(f"{index} names {shard[:80]!r}, which is no safetensors file beside it")
        path = self.path / shard
        if not path.is_file():
            raise ModelNotFound(f"the shard {shard} is missing from {self.path}; fetch the model again")
        return path

    def _open(self, path: Path) -> dict[str, _Tensor]:
        file = ModelFile(path)
        self.files.append(file)
        return _read_header(file)


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; `{}` when it is absent and not required. Raises ModelNotFound, CorruptModel."""
    if not path.is_file():
        if required:
            raise ModelNotFound(f"{path.parent} has no {path.name}, so it is not a Hugging Face model folder")
        return {}
    try:
        if path.stat().st_size > _MAX_JSON:
            raise CorruptModel(f"{path} is too large for a JSON file")
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CorruptModel(f"{path} is not valid JSON; fetch it again") from None
    if not isinstance(parsed, dict):
        raise CorruptModel(f"{path} does not hold a JSON object; fetch it again")
    return parsed


def _read_header(file: ModelFile) -> dict[str, _Tensor]:
    """The tensor table: 8 bytes of length, JSON, then the data without holes."""
    length = int(struct.unpack("<Q", file.read(0, 8).tobytes())[0])
    if length > min(_MAX_HEADER, file.size - 8):
        raise CorruptModel(f"{file.path} is truncated or not a safetensors file; fetch it again")
    try:
        header = json.loads(file.read(8, length).tobytes())
    except (ValueError, RecursionError):
        raise CorruptModel(f"the header of {file.path} is not valid JSON; fetch it again") from None
    if not isinstance(header, dict):
        raise CorruptModel(f"the header of {file.path} is not a table; fetch it again")
    header.pop("__metadata__", None)
    tensors = {name: _entry(file, name, value, 8 + length) for name, value in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise CorruptModel(f"{file.path}: '{name}' overlaps another tensor or leaves a hole; fetch it again")
        end += tensor.nbytes
    if end != file.size:
        raise CorruptModel(f"{file.path} is truncated: it has {file.size} bytes, its tensors need {end}; fetch again")
    return tensors


def _entry(file: ModelFile, name: str, value: Any, data_start: int) -> _Tensor:
    malformed = CorruptModel(f"{file.path}: the entry of {name[:80]!r} is malformed; fetch it again")
    if not isinstance(value, dict) or not name.isprintable():
        raise malformed
    dtype, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(span) or len(span) != 2 or len(shape) > 16:
        raise malformed
    if dtype not in _SIZES:
        raise UnsupportedModel(f"{file.path}: '{name}' is stored as {dtype[:16]!r}, which is not read")
    begin, end = span
    if end - begin != math.prod(shape) * _SIZES[dtype]:
        raise malformed
    return _Tensor(file, tuple(shape), dtype, data_start + begin, end - begin)


def _counts(value: object) -> TypeGuard[list[int]]:
    """Whether `value` is a list of whole numbers that fit a file."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 50 for item in value)
