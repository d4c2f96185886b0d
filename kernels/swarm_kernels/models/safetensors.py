"""Weights from a Hugging Face folder: one safetensors file or an indexed set of shards.

Owns the safetensors container (https://github.com/huggingface/safetensors, "Format") and the folder's layout. Reads
only `*.safetensors` and `*.json`: pickle files (`*.bin`, `*.pt`) are refused, as loading one can run any code.
The library's `safe_open` is not used: it maps the file into memory, and a file that shrinks then kills the process.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from swarm.errors import UNDECODABLE, CorruptModel, ModelNotFound, UnsupportedModel
from swarm.extras import HAS_TORCH, needs_torch
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.hf_config import model_config, text_part
from swarm_kernels.models.layers import in_text_part
from swarm_kernels.models.quantized.schemes import scheme_of
from swarm_kernels.models.source import LocalFiles, ModelFile, WeightFile, fingerprint, fingerprint_sample
from swarm_kernels.models.tensor_shapes import check_shapes

if TYPE_CHECKING:  # imported where a tensor is made: a client reads headers alone, and may have no torch
    import torch

    from swarm_kernels.models.quantized.packed_tensor import PackedTensor
    from swarm_kernels.ops.base.matrix import Matrix
    from swarm_kernels.ops.base.stored_weights import StoredWeights

_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_READ_BY_PARTS = frozenset({"F32", "F16", "BF16"})
_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
MAX_HEADER = 1 << 24  # bytes, of some 100,000 tensors; one file of the largest models has a hundredth of it
_MAX_JSON = 1 << 22  # bytes of a file that is read whole: each may become 25 in memory
_MAX_INDEX = 1 << 26  # of one that holds nothing but names; those of a trillion parameters have 20 MB
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_SHARDS = 4096  # each is an open file
_Count = Annotated[int, Meta(ge=0, lt=1 << 50)]
INDEX = "model.safetensors.index.json"


class _Entry(msgspec.Struct):
    """One tensor in a header. `__metadata__` is no tensor, and its texts may have these names as well."""

    dtype: str = ""
    shape: Annotated[list[_Count], Meta(max_length=16)] | str = ""
    data_offsets: Annotated[list[_Count], Meta(max_length=2)] | str = ""


class _Index(msgspec.Struct):
    weight_map: Annotated[dict[str, str], Meta(min_length=1)]


class _Described(msgspec.Struct, rename={"metadata": "__metadata__"}):
    """The texts in a header; its tensors are skipped."""

    metadata: dict[str, str] = {}


_decode_described = msgspec.json.Decoder(_Described).decode
_decode_header = msgspec.json.Decoder(dict[str, _Entry]).decode
_decode_index = msgspec.json.Decoder(_Index).decode


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor."""

    file: WeightFile
    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the file's start
    nbytes: int

    def part(self, start: int, stop: int) -> StoredTensor:
        """`[start:stop]` of its first dimension."""
        count, *rest = self.shape
        assert 0 <= start <= stop <= count
        each = self.nbytes // count
        return StoredTensor(
            self.file, (stop - start, *rest), self.dtype, self.offset + start * each, (stop - start) * each
        )


class SafetensorsSource(LocalFiles):
    """A ModelSource. Opening reads only the headers and the first 4 KiB of some tensors.

    Weights of a quantized checkpoint have their plain names and are unpacked when they are read.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Raises ModelNotFound, CorruptModel, UnsupportedModel."""
        self.path = folder
        self.name = name or folder.resolve().name
        self.files: list[WeightFile] = []
        try:
            stored, whole = self._read_tables(), read_json(folder / "config.json")
            config = text_part(whole)
            renamed = stored if config is whole else {in_text_part(name): tensor for name, tensor in stored.items()}
            self._tensors = {name: tensor for name, tensor in renamed.items() if name is not None}
            self._weights = self._unpacked(config.get("quantization_config"))
            self.config: ModelConfig = model_config(
                config,
                read_json(folder / "generation_config.json", required=False),
                has_head=any(name.startswith("lm_head.") for name in self._tensors),
                where=str(folder / "config.json"),
            )
            if self._weights or HAS_TORCH:
                check_shapes(self.config, self._weights, str(folder))
            self._before_starts(fingerprint_sample(self._tensors))
            self.weight_hash = fingerprint(
                self.config,
                [(name, t.shape, t.dtype, t.nbytes) for name, t in self._tensors.items()],
                self._start,
            )
        except BaseException:
            self.close()
            raise

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._weights))

    def has(self, hf_name: str) -> bool:
        return hf_name in self._weights

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._find(hf_name).shape

    def nbytes(self, hf_name: str) -> int:
        return self._find(hf_name).nbytes

    def tensor(self, hf_name: str) -> torch.Tensor:
        found = self._find(hf_name)
        if not isinstance(found, StoredTensor):
            return found.unpack(self._parts(found))
        if found.dtype.startswith("F8_"):  # with scales it would be packed; without them it means other numbers
            raise UnsupportedModel(f"{self.path}: '{hf_name}' is {found.dtype} and the config names no scales")
        return read_tensor(found, hf_name)

    def sliced(self, hf_name: str) -> Matrix:
        import torch

        from swarm_kernels.ops.base.matrix import ReadByParts

        found = self._find(hf_name)
        if not isinstance(found, StoredTensor):
            if not found.stacked:
                return self.tensor(hf_name)
            return ReadByParts(torch.Size(found.shape), found.dtype, partial(self._unpacked_part, found))
        if not found.shape or not found.nbytes or found.dtype not in _READ_BY_PARTS:
            return self.tensor(hf_name)
        dtype = _torch_dtype(found.dtype)
        return ReadByParts(
            torch.Size(found.shape), dtype, lambda start, stop: read_tensor(found.part(start, stop), hf_name)
        )

    def native(self, hf_name: str) -> torch.dtype:
        found = self._find(hf_name)
        return _torch_dtype("BF16") if isinstance(found, StoredTensor) else found.native

    def as_stored(self, hf_name: str, expert: int | None = None) -> StoredWeights | None:
        found = self._find(hf_name)
        if isinstance(found, StoredTensor) or found.as_stored is None or found.stacked != (expert is not None):
            return None
        if expert is None:
            return found.as_stored(self._parts(found))
        return found.as_stored({role: part[0] for role, part in self._parts(found, (expert, expert + 1)).items()})

    def stored(self, hf_name: str) -> list[StoredTensor]:
        """Where a tensor lies: in several places if it is packed. Raises CorruptModel."""
        found = self._find(hf_name)
        return [found] if isinstance(found, StoredTensor) else [self._tensors[part] for part in found.parts.values()]

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _before_starts(self, names: Sequence[str]) -> None:
        """Called with the tensors whose `_start` is asked for next."""

    def _start(self, name: str, length: int) -> npt.NDArray[np.uint8]:
        """The first bytes of a tensor."""
        return self._tensors[name].file.read(self._tensors[name].offset, length)

    def _unpacked(self, quantization: Any) -> dict[str, StoredTensor | PackedTensor]:
        """The weights by their plain names; none where they are quantized and there is no torch to unpack them with, as
        with clients. `quantization`: the config's `quantization_config`, if it has one."""
        where = str(self.path)
        if not isinstance(quantization, dict):
            return dict(self._tensors)
        scheme = scheme_of(quantization, str(self.path / "config.json"))
        if not HAS_TORCH:
            return {}
        from swarm_kernels.models.quantized.checkpoint import parts_of, small_tensors, unpacked_table

        self._before_starts(small_tensors(self._tensors))
        packed = unpacked_table(scheme, self._tensors, self._small, where)
        hidden = parts_of(scheme, self._tensors, packed)
        return {name: tensor for name, tensor in self._tensors.items() if name not in hidden} | packed

    def _small(self, name: str) -> torch.Tensor:
        """One of `small_tensors`."""
        import torch

        stored = self._tensors[name]
        return torch.from_numpy(self._start(name, stored.nbytes).copy()).view(_torch_dtype(stored.dtype))

    def _parts(self, packed: PackedTensor, of: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
        """`of`: from and to which number of their first dimension."""
        stored = {role: self._tensors[part] for role, part in packed.parts.items()}
        return {
            role: read_tensor(part if of is None else part.part(*of), packed.parts[role])
            for role, part in stored.items()
        }

    def _unpacked_part(self, packed: PackedTensor, start: int, stop: int) -> torch.Tensor:
        return packed.unpack(self._parts(packed, (start, stop)))

    def _find(self, hf_name: str) -> StoredTensor | PackedTensor:
        try:
            return self._weights[hf_name]
        except KeyError:
            raise CorruptModel(f"{self.path} has no tensor '{hf_name}'") from None

    def _read_tables(self) -> dict[str, StoredTensor]:
        index = self.path / INDEX
        if not index.is_file():
            return self._open(self._single_file())
        try:
            weight_map = _decode_index(read_bounded(index, _MAX_INDEX)).weight_map
        except UNDECODABLE:
            raise CorruptModel(f"{index} has no weight_map; fetch it again") from None
        if len(set(weight_map.values())) > _MAX_SHARDS:
            raise CorruptModel(f"{index} names more than {_MAX_SHARDS} shards; fetch it again")
        paths = {shard: self._shard(index, shard) for shard in sorted(set(weight_map.values()))}
        self._before_headers(list(paths))
        shards = {shard: self._open(path) for shard, path in paths.items()}
        tensors = {}
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                raise CorruptModel(
                    f"{index} places {name[:80]!r} in {shard[:80]!r}, but it is not there; fetch the model again"
                )
            tensors[name] = shards[shard][name]
        return tensors

    def _before_headers(self, shards: Sequence[str]) -> None:
        """Called with the files that `_open` is called with next."""

    def _safetensors(self) -> list[Path]:
        """The model's weight files."""
        return sorted(self.path.glob("*.safetensors"))

    def _single_file(self) -> Path:
        found = self._safetensors()
        usual = self.path / "model.safetensors"
        if usual in found or len(found) == 1:
            return usual if usual in found else found[0]
        if found:
            raise ModelNotFound(f"{self.path} has {len(found)} safetensors files but no {INDEX} to join them; fetch it")
        if any(entry.suffix in PICKLES for entry in self.path.iterdir()):
            raise UnsupportedModel(
                f"{self.path} has only pickle files (*.bin, *.pt), which are never loaded because they can run any "
                "code; use the model's safetensors files or a GGUF file"
            )
        raise ModelNotFound(f"{self.path} has no *.safetensors file")

    def _shard(self, index: Path, shard: str) -> Path:
        if not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise CorruptModel(f"{index} names {shard[:80]!r}, which is no safetensors file beside it")
        return self.path / shard

    def _open(self, path: Path) -> dict[str, StoredTensor]:
        file = self._file(path)
        self.files.append(file)
        return read_header(file)

    def _file(self, path: Path) -> WeightFile:
        if not path.is_file():
            raise ModelNotFound(f"the shard {path.name} is missing from {self.path}; fetch the model again")
        return ModelFile(path)


def read_json(path: Path, *, required: bool = True, limit: int | None = None) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes; `{}` when it is absent and not required.

    Raises ModelNotFound, CorruptModel.
    """
    if not path.is_file():
        if required:
            raise ModelNotFound(f"{path.parent} has no {path.name}, so it is not a Hugging Face model folder")
        return {}
    data = read_bounded(path, _MAX_JSON if limit is None else limit)
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CorruptModel(f"{path} is not valid JSON; fetch it again") from None
    if not isinstance(parsed, dict):
        raise CorruptModel(f"{path} does not hold a JSON object; fetch it again")
    return parsed


def read_bounded(path: Path, limit: int) -> bytes:
    """A small file. Raises ModelNotFound, and CorruptModel if it has more than `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from None
    if len(data) > limit:
        raise CorruptModel(f"{path} is too large: more than {limit} bytes")
    return data


def read_metadata(file: WeightFile) -> dict[str, str]:
    """The texts that a file's writer put beside its tensors. Raises CorruptModel."""
    try:
        return _decode_described(_header_json(file)).metadata
    except UNDECODABLE as error:
        raise CorruptModel(f"the header of {file.path} is malformed ({error!s:.200}); fetch it again") from None


def read_header(file: WeightFile) -> dict[str, StoredTensor]:
    """The tensor table: 8 bytes of length, JSON, then the data without holes. Raises CorruptModel, UnsupportedModel."""
    data = _header_json(file)
    length = len(data)
    try:
        header = _decode_header(data)
    except UNDECODABLE as error:
        raise CorruptModel(f"the header of {file.path} is malformed ({error!s:.200}); fetch it again") from None
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


def read_tensor(stored: StoredTensor, name: str) -> torch.Tensor:
    """Raises CorruptModel, UnsupportedModel, UsageError without torch."""
    needs_torch("a model's tensor")
    import torch

    if stored.dtype not in _TORCH_NAMES:
        raise UnsupportedModel(f"{stored.file.path}: '{name}' is stored as {stored.dtype}, which is not read")
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=_torch_dtype(stored.dtype))
    data = torch.from_numpy(stored.file.read(stored.offset, stored.nbytes))
    return data.view(_torch_dtype(stored.dtype)).reshape(stored.shape)


def _torch_dtype(name: str) -> torch.dtype:
    needs_torch("a model's tensor")
    import torch

    found: torch.dtype = getattr(torch, _TORCH_NAMES[name])
    return found


def _header_json(file: WeightFile) -> bytes:
    length = int(struct.unpack("<Q", file.read(0, 8).tobytes())[0])
    if length > min(MAX_HEADER, file.size - 8):
        raise CorruptModel(f"{file.path} is truncated or not a safetensors file; fetch it again")
    return file.read(8, length).tobytes()


def _entry(file: WeightFile, name: str, value: _Entry, data_start: int) -> StoredTensor:
    malformed = CorruptModel(f"{file.path}: the entry of {name[:80]!r} is malformed; fetch it again")
    shape, span = value.shape, value.data_offsets
    if isinstance(shape, str) or isinstance(span, str) or len(span) != 2 or not name.isprintable():
        raise malformed
    if value.dtype not in _SIZES:
        raise UnsupportedModel(f"{file.path}: '{name[:80]}' is stored as {value.dtype[:16]!r}, which is not read")
    begin, end = span
    if end - begin != math.prod(shape) * _SIZES[value.dtype]:
        raise malformed
    return StoredTensor(file, tuple(shape), value.dtype, data_start + begin, end - begin)
