"""Typed, bounded access to the metadata of one architecture in a GGUF file.

Owns the refusal of keys that nobody asked for: a key that changes the arithmetic and that we pass over would be a wrong
answer. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from swarm.errors import CorruptModel, UnsupportedModel

MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 12

_HARMLESS = frozenset({
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal", "expert_count",
    "expert_used_count", "rope.dimension_count", "attention.value_length", "attention.key_length", "pooling_type",
    "expert_group_scale",
})  # fmt: skip
"""Keys that say nothing beyond what the tensors or other keys say; those of them that could are checked."""

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GgufEntry(Protocol):
    """A tensor of the file's table."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> str:
        """llama.cpp's name of how it is stored."""
        ...


class Header(Protocol):
    """The metadata of a file; what is asked for in a type that it does not have is CorruptModel."""

    def has(self, key: str) -> bool: ...

    def keys(self, prefix: str) -> list[str]: ...

    def count(self, key: str) -> int: ...

    def integer(self, key: str, default: int | None = None) -> int | None: ...

    def number(self, key: str, default: float | None = None) -> float | None: ...

    def flag(self, key: str, default: bool) -> bool: ...

    def text(self, key: str, default: str = "") -> str: ...

    def numbers(self, key: str) -> tuple[float, ...]: ...


class Metadata:
    """The keys `{arch}.*` without that prefix. `tensors`: the file's, by llama.cpp's names. `factors`: the small
    tensors that scale the rotary embedding, decoded, by their names. All methods raise CorruptModel."""

    def __init__(
        self,
        header: Header,
        arch: str,
        tensors: Mapping[str, GgufEntry],
        factors: Mapping[str, tuple[float, ...]],
        where: str,
    ) -> None:
        self.header = header
        self.arch = arch
        self.tensors = tensors
        self.factors = factors
        self.where = where
        self._asked: set[str] = set()

    def _key(self, key: str) -> str:
        self._asked.add(key)
        return f"{self.arch}.{key}"

    def has(self, key: str) -> bool:
        return self.header.has(self._key(key))

    def integer(self, key: str, default: int | None = None) -> int | None:
        return self.header.integer(self._key(key), default)

    def need(self, key: str, most: int = 1 << 24) -> int:
        """A whole number from 1 to `most`."""
        value = self.integer(key)
        if value is None or not 1 <= value <= most:
            raise CorruptModel(f"{self.where}: the metadata has no usable '{self.arch}.{key}'")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        return self.header.number(self._key(key), default)

    def flag(self, key: str, default: bool) -> bool:
        return self.header.flag(self._key(key), default)

    def text(self, key: str, default: str = "") -> str:
        return self.header.text(self._key(key), default)

    def per_layer(self, key: str, layers: int) -> list[int]:
        """An array of whole numbers or truth values, one a layer; empty where the key is absent or no array."""
        name = self._key(key)
        if not self.header.count(name):
            return []
        values = self.header.numbers(name)
        if len(values) < layers or any(value != int(value) for value in values):
            raise CorruptModel(f"{self.where}: '{name}' is not one whole number for each of {layers} layers")
        return [int(value) for value in values[:layers]]

    def uniform(self, key: str, default: int) -> int:
        """A number, or an array of one that is the same in all layers, else UnsupportedModel."""
        name = self._key(key)
        if not self.header.count(name):
            return self.header.integer(name, default) or default
        values = set(self.header.numbers(name))
        first = values.pop()
        if values:
            raise UnsupportedModel(f"{self.where}: the layers differ in '{name}'; use the model's safetensors")
        if not isinstance(first, int):
            raise CorruptModel(f"{self.where}: '{name}' are no whole numbers")
        return int(first)

    def in_layer(self, suffix: str) -> bool:
        """Whether the tensor `blk.N.{suffix}` is in some layer among the first few, of which some are dense."""
        return any(f"blk.{layer}.{suffix}" in self.tensors for layer in range(8))

    def rows(self, name: str) -> int:
        """Of a matrix. Raises CorruptModel."""
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise CorruptModel(f"{self.where} has no tensor '{name}'; fetch the model again")
        return tensor.shape[0]

    def tokens(self) -> dict[str, Any]:
        """The fields of a config that name tokens."""
        ids = {self.header.integer(f"tokenizer.ggml.{key}") for key in _EOS_KEYS} - {None}
        return {
            "bos_token_id": self.header.integer("tokenizer.ggml.bos_token_id"),
            "eos_token_id": sorted(token for token in ids if token is not None),
            "pad_token_id": self.header.integer("tokenizer.ggml.padding_token_id"),
        }

    def refuse_the_rest(self) -> None:
        """Raises UnsupportedModel for a key that nobody asked for."""
        if not self.flag("attention.causal", True):
            raise UnsupportedModel(f"{self.where} is not a causal decoder; only causal decoders are served")
        prefix = f"{self.arch}."
        for key in sorted(self.header.keys(prefix)):
            if key.removeprefix(prefix) not in self._asked | _HARMLESS:
                raise UnsupportedModel(
                    f"{self.where}: its metadata has {key[:80]!r}, which is not read from GGUF; use its safetensors"
                )
