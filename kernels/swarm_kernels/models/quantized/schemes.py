"""A checkpoint's `quantization_config` -> how its weights are packed. Owns the accepted methods; reads no tensors.

What is not listed here is refused by name. Scales of activations are not read: weights are dequantized or repacked for
our kernels, which quantize activations in their own way.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from swarm.errors import UNDECODABLE, CorruptModel, UnsupportedModel

_MAX_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """E4M3 weights with a scale of each `block` (outputs, inputs); None: of each output or tensor."""

    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """`group`: inputs that share a scale, None for all. `plus_one`: zero points are stored less one."""

    bits: int
    group: int | None
    plus_one: bool


@dataclass(frozen=True, slots=True)
class AwqScheme:
    group: int | None


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    """compressed-tensors. `group`: of whole-number weights, as above; `block`: of fp8 weights."""

    bits: int
    floating: bool
    group: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """gpt-oss: experts in MXFP4, all else in bf16."""


@dataclass(frozen=True, slots=True)
class BitsAndBytesScheme:
    """NF4 or 8 bits, which each tensor says itself."""


Scheme = Fp8Scheme | GptqScheme | AwqScheme | CompressedScheme | Mxfp4Scheme | BitsAndBytesScheme


class _Fp8(msgspec.Struct):
    weight_block_size: list[int] | None = None
    fmt: str = "e4m3"


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int = -1
    checkpoint_format: str = "gptq"


class _Awq(msgspec.Struct):
    bits: int | UnsetType = UNSET
    w_bit: int | UnsetType = UNSET
    group_size: int | UnsetType = UNSET
    q_group_size: int | UnsetType = UNSET
    version: str = "gemm"


class _Weights(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | str | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None


class _Compressed(msgspec.Struct):
    config_groups: dict[str, _Group] = {}
    format: str = "dense"
    sparsity_config: dict[str, Any] | None = None


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme:
    """`config`: the `quantization_config` of a config.json. Raises UnsupportedModel, CorruptModel."""
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnsupportedModel(
            f"{where}: the weights are quantized with {reprlib.repr(method)}; those that are read are "
            f"{', '.join(sorted(_READERS))}, or use the original or a GGUF file"
        )
    try:
        return reader(dict(config), where)
    except UNDECODABLE as error:
        raise CorruptModel(f"{where}: the quantization_config is malformed ({error!s:.200})") from None


def _fp8(config: dict[str, Any], where: str) -> Scheme:
    read = msgspec.convert(config, _Fp8)
    if read.fmt not in ("e4m3", "float8_e4m3fn"):
        raise _refused(where, f"fp8 weights of format {read.fmt[:40]!r}")
    return Fp8Scheme(None if read.weight_block_size is None else _pair(read.weight_block_size, where))


def _gptq(config: dict[str, Any], where: str) -> Scheme:
    read = msgspec.convert(config, _Gptq)
    if read.bits not in (4, 8):
        raise _refused(where, f"GPTQ weights of {read.bits} bits")
    if read.checkpoint_format not in ("gptq", "gptq_v2"):
        raise _refused(where, f"GPTQ weights in the format {read.checkpoint_format[:40]!r}")
    return GptqScheme(read.bits, _group(read.group_size, where), read.checkpoint_format == "gptq")


def _awq(config: dict[str, Any], where: str) -> Scheme:
    read = msgspec.convert(config, _Awq)
    bits = read.bits if read.bits is not UNSET else read.w_bit
    group = read.group_size if read.group_size is not UNSET else read.q_group_size
    if bits != 4:
        raise _refused(where, f"AWQ weights of {bits} bits")
    if read.version.lower() != "gemm":
        raise _refused(where, f"AWQ weights in the layout {read.version[:40]!r}")
    return AwqScheme(_group(128 if group is UNSET else group, where))


def _compressed(config: dict[str, Any], where: str) -> Scheme:
    read = msgspec.convert(config, _Compressed)
    if read.sparsity_config and read.sparsity_config.get("format") not in (None, "dense"):
        raise _refused(where, "sparse weights of compressed-tensors")
    if read.format not in _COMPRESSED_FORMATS:
        raise _refused(where, f"compressed-tensors in the format {read.format[:40]!r}")
    schemes = {_compressed_weights(group.weights, where) for group in read.config_groups.values() if group.weights}
    if len(schemes) != 1:
        raise _refused(where, f"compressed-tensors with {len(schemes)} kinds of weights")
    return schemes.pop()


_COMPRESSED_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)  # fmt: skip


def _compressed_weights(weights: _Weights, where: str) -> CompressedScheme:
    if weights.num_bits not in (4, 8) or weights.type not in ("int", "float"):
        raise _refused(where, f"compressed-tensors of {weights.num_bits} bits {weights.type[:20]!r}")
    block = _pair(weights.block_structure, where) if isinstance(weights.block_structure, list) else None
    group = None if weights.group_size is None else _group(weights.group_size, where)
    return CompressedScheme(weights.num_bits, weights.type == "float", group, block)


def _group(size: int, where: str) -> int | None:
    """-1 stands for all inputs."""
    if size == -1:
        return None
    if not 1 <= size <= _MAX_GROUP:
        raise CorruptModel(f"{where}: groups of {size} inputs are not possible")
    return size


def _pair(block: list[int], where: str) -> tuple[int, int]:
    if len(block) != 2 or not all(1 <= size <= _MAX_GROUP for size in block):
        raise CorruptModel(f"{where}: the blocks of the fp8 weights are not (outputs, inputs)")
    return block[0], block[1]


def _refused(where: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{where}: {what} are not read; use the original or a GGUF file")


_READERS: Mapping[str, Callable[[dict[str, Any], str], Scheme]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "mxfp4": lambda config, where: Mxfp4Scheme(),
    "bitsandbytes": lambda config, where: BitsAndBytesScheme(),
}
