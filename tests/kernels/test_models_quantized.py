"""Quantized checkpoints: every format against the library that writes it, to the last bit, and malformed ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from quantized_tensors import Entry, Gptq, awq, gptq, table_of, unpacked
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swarm.errors import CorruptModel, ModelError, UnsupportedModel
from swarm_kernels.models.quantized.checkpoint import unpacked_table
from swarm_kernels.models.quantized.schemes import scheme_of

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("form", "plus_one"), [("gptq", True), ("gptq_v2", False)])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(64, 24, 32), (128, 40, 128), (96, 16, 64)])
def test_gptq(bits: int, ordered: bool, form: str, plus_one: bool, inputs: int, outputs: int, group: int) -> None:
    made = gptq(inputs, outputs, bits, group, plus_one, ordered, seed=inputs + bits)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form, "desc_act": ordered}
    assert torch.equal(unpacked(config, made.tensors)["m.weight"], made.weight)


def test_gptq_with_one_group_and_a_bias() -> None:
    made = gptq(48, 16, 4, 48, True, False, seed=1)
    bias = torch.randn(16)
    found = unpacked({"quant_method": "gptq", "bits": 4, "group_size": -1}, made.tensors | {"m.bias": bias})
    assert set(found) == {"m.weight", "m.bias"}
    assert torch.equal(found["m.weight"], made.weight)
    assert found["m.bias"] is bias


@pytest.mark.parametrize(("inputs", "outputs", "group"), [(64, 24, 32), (128, 40, 128)])
def test_awq_is_what_its_packing_and_compressed_tensors_say(inputs: int, outputs: int, group: int) -> None:
    made = awq(inputs, outputs, group, seed=inputs)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    found = unpacked(config, made.tensors)["m.weight"]
    assert torch.equal(found, made.weight)
    converted = AutoAWQConverter(group_size=group).process(dict(made.tensors))
    assert torch.equal(found, _library("pack-quantized", _args(4, "int", "group", group, False), converted))


CASES = [
    ("pack-quantized", 4, "int", "group", 32, True),
    ("pack-quantized", 4, "int", "group", 32, False),
    ("pack-quantized", 4, "int", "channel", None, True),
    ("pack-quantized", 8, "int", "group", 16, False),
    ("pack-quantized", 8, "int", "channel", None, True),
    ("int-quantized", 8, "int", "channel", None, True),
    ("int-quantized", 8, "int", "tensor", None, True),
    ("float-quantized", 8, "float", "channel", None, True),
    ("float-quantized", 8, "float", "tensor", None, True),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "bits", "kind", "strategy", "group", "symmetric"), CASES)
def test_compressed_tensors(
    form: str, bits: int, kind: str, strategy: str, group: int | None, symmetric: bool, dtype: torch.dtype
) -> None:
    args = _args(bits, kind, strategy, group, symmetric)
    tensors = _compress(form, args, torch.randn(24, 96, generator=torch.manual_seed(bits)).to(dtype))
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": symmetric}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}
    assert torch.equal(unpacked(config, tensors)["m.weight"], _library(form, args, tensors))


def test_compressed_tensors_of_an_odd_width_are_refused_when_they_are_read() -> None:
    args = _args(4, "int", "channel", None, True)
    tensors = _compress("pack-quantized", args, torch.randn(8, 90, generator=torch.manual_seed(2)).half())
    with pytest.raises(UnsupportedModel, match=r"has \[8, 90\] rows and columns"):
        unpacked(_config("compressed-tensors") | {"config_groups": {"0": {"weights": {"num_bits": 4}}}}, tensors)


@pytest.mark.parametrize(("form", "group"), [("nvfp4-pack-quantized", 16), ("mxfp4-pack-quantized", 32)])
def test_packed_floats_of_compressed_tensors(form: str, group: int) -> None:
    weight = torch.randn(12, 128, generator=torch.manual_seed(group)).bfloat16()
    largest = weight.float().unflatten(1, (-1, group)).abs().amax(-1)
    tensors: dict[str, torch.Tensor] = {"weight": weight}
    args = _args(4, "float", "tensor_group" if group == 16 else "group", group, True)
    if group == 16:
        tensors["weight_global_scale"] = 448.0 * 6.0 / weight.float().abs().max().reshape(1)
        tensors["weight_scale"] = (largest / 6.0 * tensors["weight_global_scale"]).to(FP8).to(torch.bfloat16)
    else:
        tensors["weight_scale"] = torch.exp2(torch.ceil(torch.log2(largest / 6.0)))
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = BaseCompressor.get_value_from_registry(form).compress(tensors, scheme)
    packed = {f"m.{name}": tensor for name, tensor in packed.items()}
    weights = {"num_bits": 4, "type": "float", "group_size": group}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"0": {"weights": weights}}}
    found = unpacked(config, packed)["m.weight"]
    assert torch.equal(found, _library(form, args, packed))
    assert (found.float() - weight.float()).abs().max() < 0.25 * weight.float().abs().max()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_are_what_transformers_makes_of_them(scale_dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(5)
    weight = torch.randn((256, 384), generator=rng).to(FP8)
    scale = torch.exp2(torch.randint(-9, 3, (2, 3), generator=rng).float()).to(scale_dtype)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    found = unpacked(config, {"m.weight": weight, "m.weight_scale_inv": scale})["m.weight"]
    assert torch.equal(found, Fp8Dequantize(None)._dequantize_one(weight, scale))


def test_fp8_blocks_may_be_cut_off() -> None:
    """As DeepSeek-V3's `kv_a_proj_with_mqa`, of 576 outputs."""
    rng = torch.Generator().manual_seed(6)
    weight, scale = torch.randn((40, 50), generator=rng).to(FP8), torch.rand((3, 4), generator=rng)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    found = unpacked(config, {"m.weight": weight, "m.weight_scale_inv": scale, "n.weight": torch.ones(3)})
    for row, column in ((0, 0), (15, 16), (16, 49), (39, 48), (32, 15)):
        assert found["m.weight"][row, column] == weight[row, column].float() * scale[row // 16, column // 16]
    assert torch.equal(found["n.weight"], torch.ones(3))


def test_mxfp4_experts_are_what_transformers_makes_of_them() -> None:
    rng = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 10, 4), generator=rng, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = torch.randn(3, 10)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
    found = unpacked({"quant_method": "mxfp4"}, tensors)
    assert set(found) == {name, f"{name}_bias"}
    assert torch.equal(found[name], convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("name", ["plain", "nested", "eight"])
def test_bitsandbytes(name: str) -> None:
    """Against what bitsandbytes 0.50.2 wrote and read (`data/bitsandbytes.safetensors`)."""
    stored = load_file(Path(__file__).with_name("data") / "bitsandbytes.safetensors")
    wanted = {key.removesuffix(".dequantized"): stored.pop(key) for key in list(stored) if key.endswith(".dequantized")}
    found = unpacked({"quant_method": "bitsandbytes", "load_in_4bit": True}, stored)
    assert set(found) == {f"{key}.weight" for key in wanted}
    assert torch.equal(found[f"{name}.weight"], wanted[name])


REFUSED = [
    ({"quant_method": "hqq"}, "quantized with 'hqq'"),
    ({"quant_method": 7}, "quantized with 7"),
    ({}, "quantized with None"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ weights of 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the format 'marlin'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "in the layout 'gemv'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "of format 'e5m2'"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "in the format 'marlin-24'"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "with 0 kinds"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED)
def test_other_methods_are_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        scheme_of(config, "config.json")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "gptq"},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "gptq", "bits": 4, "group_size": -7},
        {"quant_method": "awq", "bits": 4, "group_size": 1 << 40},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": {"a": 1}},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
    ],
)
def test_a_malformed_config_is_a_corrupt_model(config: dict[str, Any]) -> None:
    with pytest.raises(CorruptModel):
        scheme_of(config, "config.json")


def _config(method: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"0": {"weights": weights}}
    return {
        "quant_method": method, "bits": 4, "group_size": 32, "weight_block_size": [16, 16], "format": "pack-quantized",
        "config_groups": groups, "load_in_4bit": True,
    }  # fmt: skip


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "mxfp4", "bitsandbytes"])
def test_tables_that_do_not_fit_together_are_refused_before_anything_is_read(method: str) -> None:
    """Every tensor of a valid table is left out, or has another shape or type: a ModelError or a weight less, never
    another error, and nothing large is asked for."""
    tensors = _valid(method)
    scheme = scheme_of(_config(method), "config.json")
    read: list[str] = []

    def reader(name: str) -> torch.Tensor:
        read.append(name)
        assert tensors[name].numel() < 1000
        return tensors[name]

    valid = table_of(tensors)
    assert unpacked_table(scheme, valid, reader, "the model")
    refused = 0
    for name, entry in valid.items():
        changes: list[Entry | None] = [None, Entry((), entry.dtype), Entry((7, *entry.shape), entry.dtype)]
        changes += [Entry((*entry.shape[:-1], 1 << 40), entry.dtype), Entry(entry.shape, "BOOL")]
        for change in changes:
            table = {k: v for k, v in valid.items() if k != name} | ({} if change is None else {name: change})
            try:
                unpacked_table(scheme, table, reader, "the model")
            except ModelError:
                refused += 1
    assert refused >= 2 * len(valid)


def test_groups_out_of_range_are_refused() -> None:
    made = gptq(64, 16, 4, 32, True, True, seed=3)
    for bad in (-1, 2, 1 << 30):
        made.tensors["m.g_idx"][5] = bad
        with pytest.raises(CorruptModel, match="not among its 2"):
            unpacked({"quant_method": "gptq", "bits": 4, "group_size": 32}, made.tensors)


@pytest.mark.parametrize(
    "state",
    [b"{", b"[]", b'{"quant_type": "nf4"}', b'{"quant_type":"nf4","blocksize":0,"dtype":"float16","shape":[1]}'],
)
def test_a_malformed_state_of_bitsandbytes_is_a_corrupt_model(state: bytes) -> None:
    tensors = _valid("bitsandbytes")
    tensors["m.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    with pytest.raises(CorruptModel):
        unpacked(_config("bitsandbytes"), tensors)


def _valid(method: str) -> dict[str, torch.Tensor]:
    if method == "fp8":
        return {"m.weight": torch.zeros((40, 50)).to(FP8), "m.weight_scale_inv": torch.ones((3, 4))}
    if method == "mxfp4":
        blocks = torch.zeros((2, 4, 2, 16), dtype=torch.uint8)
        return {"m_blocks": blocks, "m_scales": torch.zeros((2, 4, 2), dtype=torch.uint8)}
    if method == "bitsandbytes":
        stored = load_file(Path(__file__).with_name("data") / "bitsandbytes.safetensors")
        return {
            name.replace("nested.", "m.", 1): tensor for name, tensor in stored.items()
            if name.startswith("nested.") and not name.endswith(".dequantized")
        }  # fmt: skip
    if method == "compressed-tensors":
        return _compress("pack-quantized", _args(4, "int", "group", 32, False), torch.randn(16, 64).half())
    made: Gptq = awq(64, 16, 32, 1) if method == "awq" else gptq(64, 16, 4, 32, True, True, 1)
    return made.tensors


def _args(bits: int, kind: str, strategy: str, group: int | None, symmetric: bool) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, group_size=group, symmetric=symmetric)


def _compress(form: str, args: QuantizationArgs, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the library makes of a weight with plausible scales."""
    groups = 1 if args.group_size in (None, -1) else weight.shape[1] // args.group_size
    dims: tuple[int, ...] = (1,) if args.strategy == "tensor" else (weight.shape[0], groups)
    most = 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1)
    rng = torch.Generator().manual_seed(9)
    scale = ((torch.rand(dims, generator=rng) + 0.5) * 3.0 / most).to(weight.dtype)
    tensors = {"weight": weight, "weight_scale": scale}
    if not args.symmetric:
        half = 2 ** (args.num_bits - 1)
        tensors["weight_zero_point"] = torch.randint(-half, half, dims, generator=rng).to(torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = BaseCompressor.get_value_from_registry(form).compress(tensors, scheme)
    return {f"m.{name}": tensor for name, tensor in packed.items()}


def _library(form: str, args: QuantizationArgs, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    local = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    weight: torch.Tensor = BaseCompressor.get_value_from_registry(form).decompress(local, scheme)["weight"]
    return weight
