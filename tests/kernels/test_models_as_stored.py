"""Weights of quantized checkpoints that are taken over without another rounding: to the last bit, or else rounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_tensors import NAMES, Entry, awq, gptq, table_of, unpacked
from safetensors.torch import load_file

from swarm.errors import CorruptModel
from swarm_kernels.models.quantized.checkpoint import unpacked_table
from swarm_kernels.models.quantized.schemes import scheme_of
from swarm_kernels.ops.base.int4_linear import quantize_weight

FP8 = torch.float8_e4m3fn


def taken_over(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The one weight, without another rounding, in fp32."""
    scheme = scheme_of(config, "config.json")
    packed = unpacked_table(scheme, table_of(tensors), tensors.__getitem__, "the model")["m.weight"]
    assert packed.as_stored is not None
    weights = packed.as_stored({role: tensors[part] for role, part in packed.parts.items()})
    return None if weights is None else weights.embedding_rows(torch.arange(packed.shape[0]))


def test_four_bits_are_taken_over_with_their_numbers() -> None:
    """Only the product of scale and zero point is rounded, to fp16."""
    cases = [
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, gptq(128, 24, 4, 64, True, False, 1)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, gptq(96, 16, 4, 96, True, False, 2)),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq(128, 40, 32, 3)),
    ]
    for config, made in cases:
        made.tensors.pop("m.g_idx", None)
        found = taken_over(config, made.tensors)
        assert found is not None
        wanted = made.weight.float()
        assert (found - wanted).abs().max() <= 2.0**-11 * 15 * made.tensors["m.scales"].float().max()
        again = quantize_weight(wanted).embedding_rows(torch.arange(len(wanted)))
        assert (found - wanted).norm() < 0.1 * (again - wanted).norm()


def test_what_does_not_fit_our_groups_is_rounded_instead() -> None:
    narrow = gptq(96, 16, 4, 16, True, False, 4)
    narrow.tensors.pop("m.g_idx")
    assert taken_over({"quant_method": "gptq", "bits": 4, "group_size": 16}, narrow.tensors) is None
    cut = awq(96, 16, 64, 5)
    assert taken_over({"quant_method": "awq", "bits": 4, "group_size": 64}, cut.tensors) is None
    tiny = awq(64, 16, 32, 6)
    tiny.tensors["m.scales"] = tiny.tensors["m.scales"].float() * 1e-7
    assert taken_over({"quant_method": "awq", "bits": 4, "group_size": 32}, tiny.tensors) is None
    ordered = gptq(64, 16, 4, 32, True, True, 7)
    scheme = scheme_of({"quant_method": "gptq", "bits": 4, "group_size": 32}, "config.json")
    assert (
        unpacked_table(scheme, table_of(ordered.tensors), ordered.tensors.__getitem__, "m")["m.weight"].as_stored
        is None
    )


def fp8_config(block: tuple[int, int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": None if block is None else list(block)}


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [
        ((256, 384), (128, 128), (2, 3)),
        ((40, 300), (16, 128), (3, 3)),
        ((40, 300), (16, 256), (3, 2)),
        ((24, 96), (24, 128), (1, 1)),
        ((24, 260), None, (24, 1)),
        ((24, 260), None, (24,)),
        ((24, 260), (128, 128), (1,)),
    ],
)
def test_fp8_is_taken_over_to_the_last_bit(
    scale_dtype: torch.dtype, shape: tuple[int, int], block: tuple[int, int] | None, scales: tuple[int, ...]
) -> None:
    rng = torch.Generator().manual_seed(8)
    tensors = {
        "m.weight": torch.randn(shape, generator=rng).to(FP8),
        "m.weight_scale_inv": torch.exp2(torch.randint(-9, 3, scales, generator=rng).float()).to(scale_dtype),
    }
    config = fp8_config(block)
    found, wanted = taken_over(config, tensors), unpacked(config, tensors)["m.weight"]
    assert found is not None
    assert torch.equal(found.to(wanted.dtype), wanted)


def test_fp8_that_the_kernels_do_not_hold_is_rounded_instead() -> None:
    """Narrow blocks, odd widths and other floats; numbers that are none."""
    weight, scheme = torch.ones(4, 256).to(FP8), scheme_of(fp8_config((4, 64)), "config.json")
    for kind, columns, scales in (("F8_E4M3", 256, 4), ("F8_E4M3", 250, 4), ("F8_E5M2", 256, 4)):
        stored = {"m.weight": Entry((4, columns), kind), "m.weight_scale_inv": Entry((1, scales), "F32")}
        packed = unpacked_table(scheme, stored, {}.__getitem__, "m")["m.weight"]
        assert packed.as_stored is None
        assert packed.native == torch.int8
    for place, value in (("m.weight", float("nan")), ("m.weight_scale_inv", float("inf"))):
        tensors = {"m.weight": weight.clone(), "m.weight_scale_inv": torch.ones(1, 2)}
        tensors[place][0, 1] = value
        assert taken_over(fp8_config((4, 128)), tensors) is None


def test_nf4_is_taken_over_to_the_last_bit() -> None:
    """What bitsandbytes wrote, of 128 inputs; the other weight has 200, which are not whole groups."""
    stored = load_file(Path(__file__).with_name("data") / "bitsandbytes.safetensors")
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    table = unpacked_table(scheme_of(config, "config.json"), table_of(stored), stored.__getitem__, "m")
    assert table["nested.weight"].as_stored is None
    plain = table["plain.weight"]
    assert plain.as_stored is not None
    parts = {role: stored[part] for role, part in plain.parts.items()}
    weights = plain.as_stored(parts)
    assert weights is not None
    assert torch.equal(weights.embedding_rows(torch.arange(6)).half(), stored["plain.dequantized"])
    assert plain.as_stored(parts | {"code": parts["code"].flip(0)}) is None
    assert plain.as_stored(parts | {"scale": parts["scale"] * float("inf")}) is None


@pytest.mark.parametrize("part", ["weight", "weight.absmax"])
def test_what_indexes_a_table_is_stored_in_bytes(part: str) -> None:
    stored = load_file(Path(__file__).with_name("data") / "bitsandbytes.safetensors")
    name = f"nested.{part}"
    stored[name] = torch.full_like(stored[name], 100, dtype=torch.int16)
    scheme = scheme_of({"quant_method": "bitsandbytes", "load_in_4bit": True}, "config.json")
    with pytest.raises(CorruptModel, match="is not stored in bytes"):
        unpacked_table(scheme, {k: Entry(tuple(v.shape), NAMES.get(v.dtype, "I16")) for k, v in stored.items()},
                       stored.__getitem__, "m")  # fmt: skip
