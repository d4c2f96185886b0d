"""The header of a GGUF file: metadata and tensor table, parsed with every count checked against the file's size.

Owns the container format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3). gguf-py's
reader is not used: it maps the file into memory, so that a truncated one is a bus error and not CorruptModel; an array
that claims 2^40 values takes it minutes; and it builds Python objects for each of the 49,152 vocabulary entries of the
built-in model: 2 s and 165 MB, against 30 ms and 4 MB here, where arrays are skipped and decoded on demand. The
meaning of metadata and tensors is not known here."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.gguf_types.blocks import QUANT_BLOCKS
from swarm_kernels.models.source import ModelFile

_MAX_HEADER = 1 << 26  # bytes; the largest known, with 262,144 tokens and their merges, have 14 MB
_MAX_KEYS = 1 << 14
_MAX_TENSORS = 1 << 17
_MAX_NAME = 1 << 12
_MAX_TEXT = 1 << 24
_MAX_DIMS = 4
_MAX_STRINGS = 1 << 21  # in all arrays: each takes a step of the interpreter
_MAX_NUMBERS = 1 << 21  # of an array that is decoded
_CHUNK = 1 << 22
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of one tensor. `shape` is in torch order, slowest dimension first; `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int

    @property
    def dtype(self) -> str:
        return QUANT_BLOCKS[self.ggml_type][0]


@dataclass(frozen=True, slots=True)
class _SkippedArray:
    """An array that was skipped, not decoded: `count` values of `kind` from `start` in the header's bytes."""

    kind: int
    count: int
    start: int


class GgufHeader:
    """Metadata and tensor table of one file. Raises only CorruptModel or UnsupportedModel."""

    def __init__(self, file: ModelFile) -> None:
        cursor = _Cursor(file)
        if cursor.raw(4) != b"GGUF":
            raise CorruptModel(f"{file.path} is not a GGUF file: it does not begin with the letters GGUF")
        version = cursor.u32()
        if version not in (2, 3):
            raise UnsupportedModel(f"{file.path} is GGUF version {version}; only versions 2 and 3 are read")
        tensor_count, key_count = cursor.u64(), cursor.u64()
        if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
            raise cursor.corrupt(f"it claims {tensor_count} tensors and {key_count} metadata keys")
        self._path = file.path
        self._values: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.name()
            if key in self._values:
                raise cursor.corrupt(f"metadata key '{key}' appears twice")
            self._values[key] = cursor.value(cursor.u32())
        self.tensors = _read_tensors(cursor, tensor_count, self._alignment(cursor))
        self._bytes = cursor.consumed()

    def _alignment(self, cursor: _Cursor) -> int:
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise cursor.corrupt(f"its alignment is {alignment!r}, not a power of two")
        return alignment

    def has(self, key: str) -> bool:
        return key in self._values

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    def count(self, key: str) -> int:
        """Length of an array, 0 when the key is absent or no array."""
        value = self._values.get(key)
        return value.count if isinstance(value, _SkippedArray) else 0

    def integer(self, key: str, default: int | None = None) -> int | None:
        value = self._values.get(key, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise CorruptModel(f"{self._path}: '{key}' is not a whole number")

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self._values.get(key, default)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise CorruptModel(f"{self._path}: '{key}' is not a number")

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if isinstance(value, bool):
            return value
        raise CorruptModel(f"{self._path}: '{key}' is not true or false")

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key, default)
        if isinstance(value, str):
            return value
        raise CorruptModel(f"{self._path}: '{key}' is not a text")

    def numbers(self, key: str) -> tuple[float, ...]:
        """A numeric array, decoded now; empty when the key is absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, _SkippedArray) or value.kind == _STRING:
            raise CorruptModel(f"{self._path}: '{key}' is not an array of numbers")
        if value.count > _MAX_NUMBERS:
            raise CorruptModel(f"{self._path}: '{key}' has {value.count} numbers; fetch it again")
        return struct.unpack_from(f"<{value.count}{_SCALARS[value.kind]}", self._bytes, value.start)

    def strings(self, key: str, longest: int) -> list[str]:
        """A string array, decoded now; empty when the key is absent. Bytes that are no UTF-8 become U+FFFD.

        Raises CorruptModel if one has more than `longest` bytes.
        """
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, _SkippedArray) or value.kind != _STRING:
            raise CorruptModel(f"{self._path}: '{key}' is not an array of texts")
        data, position, unpack = self._bytes, value.start, _U64.unpack_from
        found = []
        for _ in range(value.count):
            length = unpack(data, position)[0]
            if length > longest:
                raise CorruptModel(f"{self._path}: '{key}' has a text of {length} bytes; fetch it again")
            end = position + 8 + length
            found.append(data[position + 8 : end].decode("utf-8", "replace"))
            position = end
        return found


class _Cursor:
    """Reads forward through a file in growing chunks; running past its end is CorruptModel."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._data = bytearray()
        self._strings = 0
        self.position = 0

    def consumed(self) -> bytes:
        return bytes(memoryview(self._data)[: self.position])

    def corrupt(self, why: str) -> CorruptModel:
        return CorruptModel(f"the header of {self._file.path} is malformed: {why}; fetch the file again")

    def check_size(self, end: int) -> None:
        if end > self._file.size:
            size = self._file.size
            raise CorruptModel(
                f"{self._file.path} is truncated: it has {size} bytes, its tensors need {end}; fetch it again"
            )

    def advance(self, length: int) -> int:
        """Read `length` more bytes and move past them. -> where they start."""
        start, end = self.position, self.position + length
        if end > self._file.size:
            raise CorruptModel(f"{self._file.path} is truncated or malformed: its header runs past its end")
        if end > _MAX_HEADER:
            raise self.corrupt(f"it is larger than {_MAX_HEADER >> 20} MiB")
        while end > len(self._data):
            have = len(self._data)
            self._data += self._file.read(have, min(max(_CHUNK, have), self._file.size - have)).data
        self.position = end
        return start

    def raw(self, length: int) -> bytes:
        start = self.advance(length)
        return bytes(self._data[start : start + length])

    def u32(self) -> int:
        start = self.advance(4)
        return int(_U32.unpack_from(self._data, start)[0])

    def u64(self) -> int:
        start = self.advance(8)
        return int(_U64.unpack_from(self._data, start)[0])

    def text(self, limit: int) -> str:
        length = self.u64()
        if length > limit:
            raise self.corrupt(f"a text of {length} bytes")
        return self.raw(length).decode("utf-8", "replace")

    def name(self) -> str:
        name = self.text(_MAX_NAME)
        if not name.isprintable():
            raise self.corrupt("a name that cannot be printed")
        return name

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text(_MAX_TEXT)
        if kind == _ARRAY:
            return self._array(self.u32(), self.u64())
        start = self._skip_numbers(kind, 1)
        return struct.unpack_from("<" + _SCALARS[kind], self._data, start)[0]

    def _skip_numbers(self, kind: int, count: int) -> int:
        """-> where they start."""
        code = _SCALARS.get(kind)
        if code is None:
            raise self.corrupt(f"value type {kind} does not exist")
        return self.advance(count * struct.calcsize("<" + code))

    def _array(self, kind: int, count: int) -> _SkippedArray:
        if kind == _ARRAY:
            raise UnsupportedModel(f"{self._file.path} has nested arrays in its metadata, which are not read")
        if kind != _STRING:
            return _SkippedArray(kind, count, self._skip_numbers(kind, count))
        self._strings += count
        if self._strings > _MAX_STRINGS:
            raise self.corrupt(f"more than {_MAX_STRINGS} texts in arrays")
        start = self.position
        unpack = _U64.unpack_from
        for _ in range(count):
            position = self.advance(8)
            self.advance(unpack(self._data, position)[0])
        return _SkippedArray(kind, count, start)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    entries = []
    for _ in range(count):
        name = cursor.name()
        dims = cursor.u32()
        if not 1 <= dims <= _MAX_DIMS:
            raise cursor.corrupt(f"tensor '{name}' has {dims} dimensions")
        shape = tuple(reversed([cursor.u64() for _ in range(dims)]))
        entries.append((name, shape, cursor.u32(), cursor.u64()))
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise cursor.corrupt(f"tensor '{name}' appears twice")
        if offset % alignment:
            raise cursor.corrupt(f"tensor '{name}' is not aligned")
        tensors[name] = GgufTensor(name, shape, kind, data_start + offset, _stored_bytes(cursor, name, shape, kind))
    _check_extents(cursor, tensors)
    return tensors


def _stored_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> int:
    if kind not in QUANT_BLOCKS:
        raise UnsupportedModel(f"tensor '{name}' has the unknown ggml type {kind}; convert the model to another type")
    _, values, size = QUANT_BLOCKS[kind]
    if min(shape) < 1 or shape[-1] % values:
        raise cursor.corrupt(f"tensor '{name}' has the impossible shape {list(shape)}")
    return math.prod(shape) // values * size


def _check_extents(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    """Tensors must lie inside the file and not overlap."""
    end = 0
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise cursor.corrupt(f"tensor '{tensor.name}' overlaps another")
        end = tensor.offset + tensor.nbytes
    cursor.check_size(end)
