"""Linears of 4-bit codes: every instruction set computes the twin's bits, on the weights that the files stand for."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from code_cases import random_codes
from quantized_tensors import table_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swarm.errors import KernelError
from swarm_kernels.models.gguf_types.blocks import QUANT_BLOCKS
from swarm_kernels.models.gguf_types.dequant import GGUF_CODES
from swarm_kernels.models.gguf_types.four_bits import four_bits_from_gguf
from swarm_kernels.models.quantized.checkpoint import unpacked_table
from swarm_kernels.models.quantized.schemes import scheme_of
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.codebook_linear import (
    CodebookLinear,
    CodedWeights,
    CodeFormat,
    codes_of,
    pairs_of,
    quantize_mxfp4,
)
from swarm_kernels.ops.base.exact_linear import dequantized_linear
from swarm_kernels.ops.base.experts import Gating, PlainExperts
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.ops.base.stored_weights import stacked

TYPES = {name: number for number, (name, _, _) in QUANT_BLOCKS.items()}
FORMS = pytest.mark.parametrize("form", list(CodeFormat), ids=lambda form: form.value)
OF_GGUF = pytest.mark.parametrize("form", list(GGUF_CODES.values()), ids=lambda form: form.value)
BITS = {CodeFormat.MXFP4: 4.25, CodeFormat.IQ4_NL: 4.5, CodeFormat.IQ4_XS: 4.3125, CodeFormat.NF4: 4.5}


@FORMS
@pytest.mark.parametrize("code", [0, 7, 15])
def test_the_largest_sums_fit(isa: str, form: CodeFormat, code: int) -> None:
    """Products of 127 with the extremes of the codebook throughout, of either sign."""
    weights = random_codes(form, 32, 512)
    weights = CodedWeights(form, torch.full_like(weights.pairs, code * 17), weights.scale, weights.factor)
    packed, plain = dispatch.pack_stored(weights, None, 512), CodebookLinear(weights, None)
    for x in (torch.ones(7, 512), -torch.ones(7, 512)):
        assert torch.equal(packed(x), plain(x))
        numbers = weights.group_numbers() * weights.scales().repeat_interleave(32, 1)
        exact = x.double() @ numbers.double().T
        torch.testing.assert_close(plain(x).double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 238, 239])
def test_every_power_of_two_is_that_of_the_format(isa: str, exponent: int) -> None:
    """Subnormal ones as well. Inputs keep products within fp32."""
    weights = random_codes(CodeFormat.MXFP4, 16, 64)
    weights = CodedWeights(weights.form, weights.pairs, torch.full_like(weights.scale, exponent))
    packed, plain = dispatch.pack_stored(weights, None, 64), CodebookLinear(weights, None)
    assert weights.scales()[0, 0] == torch.tensor(2.0, dtype=torch.float64) ** (exponent - 128)
    x = torch.randn(3, 64) * (1e-20 if exponent > 127 else 1e20)
    assert torch.equal(packed(x), plain(x))
    assert plain(x).abs().max() > 0
    assert torch.equal(packed.embedding_rows(torch.arange(16)), weights.embedding_rows(torch.arange(16)))


@FORMS
def test_what_the_activations_8_bits_cost(isa: str, form: CodeFormat) -> None:
    """Against the dequantized weights with float activations: the same share of a result as of int4. Of NF4 with what
    its numbers are rounded by."""
    weights, x = random_codes(form, 256, 768), torch.randn(20, 768)
    exact = dequantized_linear(weights, None, 768)(x)
    assert (dispatch.pack_stored(weights, None, 768)(x) - exact).norm() / exact.norm() < 0.01


@FORMS
def test_memory_is_that_of_the_files(form: CodeFormat) -> None:
    weights = random_codes(form, 128, 2048)
    assert 8 * weights.nbytes == BITS[form] * 128 * 2048
    assert dispatch.pack_stored(weights, None, 2048).nbytes == weights.nbytes


@FORMS
def test_rows_of_weights_are_what_is_multiplied(form: CodeFormat) -> None:
    weights, ids = random_codes(form, 40, 512), torch.tensor([39, 0, 17, 17])
    packed, plain = dispatch.pack_stored(weights, None, 512), CodebookLinear(weights, None)
    assert torch.equal(packed.embedding_rows(ids), plain.embedding_rows(ids))
    assert packed.embedding_rows(ids[:0]).shape == (0, 512)
    assert torch.equal(plain.embedding_rows(ids), weights.rows(ids).embedding_rows(torch.arange(4)))


@OF_GGUF
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_gguf_keep_their_values(form: CodeFormat, seed: int) -> None:
    """To the last bit of what gguf-py makes of them."""
    name = form.value.upper()
    _, values, size = QUANT_BLOCKS[TYPES[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (6 * 2, size), dtype=np.uint8)
    if form is CodeFormat.MXFP4:
        blocks[:, 0] = rng.integers(0, 240, len(blocks))
    else:
        blocks[:, :2] = rng.uniform(-0.02, 0.02, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    weights = four_bits_from_gguf(blocks.reshape(-1), TYPES[name], (6, 2 * values))
    assert isinstance(weights, CodedWeights)
    wanted = gguf.quants.dequantize(blocks.reshape(6, -1), gguf.GGMLQuantizationType[name])
    assert torch.equal(weights.embedding_rows(torch.arange(6)), torch.from_numpy(wanted))


@pytest.mark.parametrize("form", [CodeFormat.MXFP4, CodeFormat.IQ4_NL], ids=lambda form: form.value)
def test_scales_that_are_no_numbers_are_not_taken_over(form: CodeFormat) -> None:
    _, values, size = QUANT_BLOCKS[TYPES[form.value.upper()]]
    assert four_bits_from_gguf(np.full(2 * size, 255, dtype=np.uint8), TYPES[form.value.upper()], (2, values)) is None


def test_experts_of_gpt_oss_keep_their_values() -> None:
    """Those that transformers unpacks from the same bytes, expert by expert."""
    rng = torch.Generator().manual_seed(1)
    tensors = {
        "m_blocks": torch.randint(0, 256, (3, 10, 4, 16), generator=rng, dtype=torch.uint8),
        "m_scales": torch.randint(100, 140, (3, 10, 4), generator=rng, dtype=torch.uint8),
    }
    scheme = scheme_of({"quant_method": "mxfp4"}, "config.json")
    packed = unpacked_table(scheme, table_of(tensors), tensors.__getitem__, "m")["m"]
    wanted = convert_moe_packed_tensors(tensors["m_blocks"], tensors["m_scales"])
    assert packed.as_stored is not None
    assert packed.stacked
    for expert in range(3):
        weights = packed.as_stored({role: tensors[part][expert] for role, part in packed.parts.items()})
        assert isinstance(weights, CodedWeights)
        assert torch.equal(weights.embedding_rows(torch.arange(10)).T, wanted[expert].float())


@FORMS
def test_experts_compute_with_codes(isa: str, form: CodeFormat) -> None:
    gating = Gating(alpha=1.702, limit=7.0, shift=1.0)

    def linears(outputs: int) -> list[Linear]:
        bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1))
        return [dispatch.pack_stored(random_codes(form, outputs, 256, seed), bias, 256) for seed in range(6)]

    first, second = linears(512), linears(256)
    compiled, plain = dispatch.pack_experts(first, second, gating), PlainExperts(first, second, gating)
    assert type(compiled) is not type(plain)
    for rows in (1, 5, 40):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 256, generator=generator)
        index = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
        scores = torch.rand(rows, 2, generator=generator)
        expected = plain(x, index, scores)
        together = compiled(x, index, scores)
        assert (together - expected).norm() < 3e-3 * expected.norm()
        assert torch.equal(compiled(x[:1], index[:1], scores[:1]), together[:1])


def test_formats_are_not_mixed_in_one_matrix() -> None:
    a, b = random_codes(CodeFormat.MXFP4, 8, 64), random_codes(CodeFormat.IQ4_NL, 8, 64)
    both = stacked([a, a])
    assert stacked([a, b]) is None
    assert both is not None
    assert both.out_features == 16
    assert torch.equal(both.embedding_rows(torch.arange(8, 16)), a.embedding_rows(torch.arange(8)))


def test_pairs_and_codes() -> None:
    codes = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    assert torch.equal(codes_of(pairs_of(codes)), codes)


def test_rounding_to_mxfp4_takes_the_nearest_number() -> None:
    """By brute force over the sixteen; ties to the even code, scales as section 6.3 of the specification says."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-8, 8, 9)[:, None]
    weight[0], weight[1, :32] = 0.0, 0.0
    weight[2, :8] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * 2.0**-3
    weight[2, 8:32] = 0.0
    found = quantize_mxfp4(weight)
    scales = found.scales().repeat_interleave(32, 1)
    peaks = weight.unflatten(1, (2, 32)).abs().amax(2).repeat_interleave(32, 1)
    some = peaks > 0
    assert torch.equal((2 * scales)[some], 2.0 ** (peaks[some].log2().floor() - 2))
    numbers = torch.tensor(CodeFormat.MXFP4.numbers) * scales[..., None]
    least = (numbers - weight[..., None]).abs().amin(2)
    rounded = found.embedding_rows(torch.arange(9))
    assert torch.equal((rounded - weight).abs(), least)
    assert rounded[2, :8].mul(8).tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    for bad in (torch.full((2, 32), torch.inf), torch.zeros(2, 33)):
        with pytest.raises(KernelError):
            quantize_mxfp4(bad)
