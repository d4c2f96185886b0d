"""The table of a quantized checkpoint -> its weights under their plain names.

Owns which stored tensors belong together, by their names and the scheme. A tensor that belongs to nothing keeps its
name. Every shape is checked against the others before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from swarm.errors import UNDECODABLE, CorruptModel, UnsupportedModel
from swarm_kernels.models.quantized import floats, integers
from swarm_kernels.models.quantized.packed_tensor import FLOATING, PackedTensor, Stored, Table
from swarm_kernels.models.quantized.schemes import (
    AwqScheme,
    BitsAndBytesScheme,
    CompressedScheme,
    Fp8Scheme,
    GptqScheme,
    Mxfp4Scheme,
    Scheme,
)

ReadTensor = Callable[[str], torch.Tensor]
_FP8 = ("F8_E4M3", "F8_E5M2")
_NOT_WEIGHTS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".activation_scale", ".k_scale",
    ".v_scale", ".weight_shape", ".weight_zero_point", ".qzeros", ".g_idx",
)  # fmt: skip
_NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MAX_STATE = 1 << 12  # bytes of a JSON of ten numbers
_Size = Annotated[int, Meta(ge=1, lt=1 << 32)]


def unpacked_table(
    scheme: Scheme, stored: Mapping[str, Stored], read: ReadTensor, where: str
) -> dict[str, PackedTensor]:
    """The weights that are stored in parts, by plain name ("model.layers.0.mlp.up_proj.weight").

    `read` reads one of `small_tensors`. Raises CorruptModel, UnsupportedModel.
    """
    table = Table(stored, where)
    match scheme:
        case Fp8Scheme(block):
            return _each(table, ".weight", lambda module: _fp8(table, module, block))
        case GptqScheme(bits, group, plus_one):
            return _each(
                table,
                ".qweight",
                lambda module: integers.gptq(
                    table, module, bits, group or _inputs(table, module, 32 // bits), plus_one
                ),
            )
        case AwqScheme(group):
            return _each(
                table, ".qweight", lambda module: integers.awq(table, module, group or _inputs(table, module, 1))
            )
        case CompressedScheme():
            packed = _each(table, ".weight_packed", lambda module: _compressed_packed(table, scheme, module))
            return packed | _each(table, ".weight", lambda module: _compressed_plain(table, scheme, module))
        case Mxfp4Scheme():
            names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
            return {name: floats.mxfp4_experts(table, name) for name in names}
        case BitsAndBytesScheme():
            return _each(table, ".weight", lambda module: _bitsandbytes(table, module, read))


def small_tensors(stored: Mapping[str, Stored]) -> list[str]:
    """Those that `unpacked_table` may read, of at most 4 KiB each."""
    return [
        name for name, tensor in stored.items() if name.endswith(_NF4_STATE) and math.prod(tensor.shape) <= _MAX_STATE
    ]


def parts_of(scheme: Scheme, stored: Mapping[str, Stored], packed: Mapping[str, PackedTensor]) -> frozenset[str]:
    """The stored names that are parts of weights, or say how activations are quantized: no weights by themselves."""
    parts = {part for tensor in packed.values() for part in tensor.parts.values()}
    extra = {name for name in stored if name.endswith(_NOT_WEIGHTS)}
    if isinstance(scheme, BitsAndBytesScheme):
        extra |= {name for name in stored if name.endswith((_NF4_STATE, ".weight_format"))}
    return frozenset(parts | extra)


def _each(table: Table, suffix: str, make: Callable[[str], PackedTensor | None]) -> dict[str, PackedTensor]:
    """`make` for each module with a tensor of that suffix."""
    found = {}
    for name in table.stored:
        if name.endswith(suffix):
            module = name.removesuffix(suffix)
            packed = make(module)
            if packed is not None:
                found[f"{module}.weight"] = packed
    return found


def _inputs(table: Table, module: str, each: int) -> int:
    return table.shape(f"{module}.qweight", 2)[0] * each


def _fp8(table: Table, module: str, block: tuple[int, int] | None) -> PackedTensor | None:
    if table.stored[f"{module}.weight"].dtype not in _FP8:
        return None
    for scale in ("weight_scale_inv", "weight_scale"):
        if f"{module}.{scale}" in table.stored:
            return floats.fp8(table, module, f"{module}.{scale}", block)
    raise CorruptModel(f"{table.where} has no scales for '{module[:120]}.weight'; fetch the model again")


def _compressed_packed(table: Table, scheme: CompressedScheme, module: str) -> PackedTensor:
    if scheme.floating:
        if scheme.bits != 4:
            raise UnsupportedModel(f"{table.where}: '{module[:120]}' has packed floats of {scheme.bits} bits")
        return floats.fp4(table, module, scheme.group or 16)
    return integers.compressed_int(table, module, scheme.bits, scheme.group)


def _compressed_plain(table: Table, scheme: CompressedScheme, module: str) -> PackedTensor | None:
    scale = f"{module}.weight_scale"
    if scale not in table.stored:
        return None
    dtype = table.stored[f"{module}.weight"].dtype
    if dtype in _FP8:
        return floats.fp8(table, module, scale, scheme.block)
    if dtype == "I8":
        return integers.plain_int8(table, module, scale)
    raise UnsupportedModel(
        f"{table.where}: '{module[:120]}.weight' is stored as {dtype} with scales, which is not read"
    )


class _State(msgspec.Struct):
    """What bitsandbytes writes beside an NF4 tensor."""

    quant_type: str
    blocksize: _Size
    dtype: str
    shape: Annotated[list[_Size], Meta(min_length=1, max_length=3)]
    nested_blocksize: _Size = 1
    nested_offset: float = 0.0


_decode_state = msgspec.json.Decoder(_State).decode


def _bitsandbytes(table: Table, module: str, read: ReadTensor) -> PackedTensor | None:
    name = f"{module}.weight"
    if f"{module}.SCB" in table.stored and table.stored[name].dtype == "I8":
        return integers.plain_int8(table, module, f"{module}.SCB", per=127.0)
    if module + _NF4_STATE not in table.stored:
        return None
    state = _read_state(table, module + _NF4_STATE, read)
    shape, count = tuple(state.shape), math.prod(state.shape)
    parts = {"values": name, "scale": f"{name}.absmax", "code": f"{name}.quant_map"}
    blocks = -(-count // state.blocksize)
    table.expect(parts["values"], (-(-count // 2), 1), (-(-count // 2),))
    table.expect(parts["code"], (16,))
    _expect_bytes(table, parts["values"])
    table.expect(parts["scale"], (blocks,))
    if f"{name}.nested_absmax" in table.stored:
        parts |= {"nested_scale": f"{name}.nested_absmax", "nested_code": f"{name}.nested_quant_map"}
        table.expect(parts["nested_scale"], (-(-blocks // state.nested_blocksize),))
        table.expect(parts["nested_code"], (256,))
        _expect_bytes(table, parts["scale"])
    elif table.stored[parts["scale"]].dtype not in FLOATING:
        raise CorruptModel(f"{table.where}: the scales of '{name[:120]}' are not floats; fetch the model again")
    return floats.nf4(
        parts, shape, _DTYPES[state.dtype], (state.blocksize, state.nested_blocksize, state.nested_offset)
    )


def _expect_bytes(table: Table, name: str) -> None:
    """Numbers that index a table."""
    if table.stored[name].dtype != "U8":
        raise CorruptModel(f"{table.where}: '{name[:120]}' is not stored in bytes; fetch the model again")


def _read_state(table: Table, name: str, read: ReadTensor) -> _State:
    (size,) = table.shape(name, 1)
    if size > _MAX_STATE or table.stored[name].dtype != "U8":
        raise CorruptModel(f"{table.where}: '{name[:120]}' is not what bitsandbytes writes; fetch the model again")
    try:
        state = _decode_state(read(name).numpy().tobytes())
    except UNDECODABLE as error:
        raise CorruptModel(f"{table.where}: '{name[:120]}' is malformed ({error!s:.200})") from None
    if state.quant_type != "nf4" or state.dtype not in _DTYPES:
        raise UnsupportedModel(f"{table.where}: weights of type {state.quant_type[:20]!r} are not read")
    return state
