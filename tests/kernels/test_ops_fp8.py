"""Linears of E4M3: their numbers, their plain twin, and experts of them. `test_ops_quantized` has their bits."""

from __future__ import annotations

import pytest
import torch
from code_cases import random_codes, random_fp8, summed_in_groups

from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.codebook_linear import CodeFormat
from swarm_kernels.ops.base.experts import Gating, PlainExperts
from swarm_kernels.ops.base.fp8_linear import Fp8Linear, Fp8Weights, fp8_weights
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.ops.base.stored_weights import stacked


def test_every_number_is_that_of_the_format(isa: str) -> None:
    """An input of 1 among zeros: subnormal numbers and both zeros too."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127][:, None].expand(-1, 4).contiguous()
    packed = dispatch.pack_stored(Fp8Weights(codes, torch.ones(len(codes), 1)), None, 4)
    wanted = codes[:, 0].view(torch.float8_e4m3fn).float()
    assert torch.equal(packed(torch.eye(4)), wanted.expand(4, -1))


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (40, 260), (1, 4)])
def test_plain_torch_computes_the_same_but_for_the_order(outputs: int, inputs: int) -> None:
    weights, x = random_fp8(outputs, inputs), torch.randn(7, inputs)
    bias = torch.randn(outputs)
    expected = summed_in_groups(weights, x) + bias
    torch.testing.assert_close(Fp8Linear(weights, bias)(x), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_weights_are_what_is_multiplied() -> None:
    weights, ids = random_fp8(40, 260), torch.tensor([39, 0, 17, 17])
    packed = dispatch.pack_stored(weights, None, 260)
    wanted = weights.codes.view(torch.float8_e4m3fn).float() * weights.scale.repeat_interleave(128, 1)[:, :260]
    assert torch.equal(packed.embedding_rows(ids), wanted[ids])
    assert torch.equal(Fp8Linear(weights, None).embedding_rows(ids), wanted[ids])
    assert packed.embedding_rows(ids[:0]).shape == (0, 260)


def test_memory_is_that_of_the_codes_and_a_scale_for_each_128() -> None:
    weights = random_fp8(128, 2048)
    assert weights.nbytes == 128 * (2048 + 4 * 16)
    assert dispatch.pack_stored(weights, None, 2048).nbytes == weights.nbytes


@pytest.mark.parametrize(("code", "scale"), [(0x7F, 1.0), (0xFF, 1.0), (0, float("nan")), (0, float("inf"))])
def test_what_is_no_number_is_not_taken_over(code: int, scale: float) -> None:
    codes, scales = torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1)
    assert fp8_weights(codes, scales) is not None
    codes[1, 2], scales[1, 0] = code, scale
    assert fp8_weights(codes, scales) is None


def test_a_matrix_of_several_has_one_format() -> None:
    a = random_fp8(8, 128)
    both = stacked([a, a])
    assert both is not None
    assert torch.equal(both.embedding_rows(torch.arange(8, 16)), a.embedding_rows(slice(None)))
    assert stacked([a, random_codes(CodeFormat.MXFP4, 8, 128)]) is None


def test_experts_compute_with_codes(isa: str) -> None:
    gating = Gating()

    def linears(outputs: int, inputs: int) -> list[Linear]:
        return [dispatch.pack_stored(random_fp8(outputs, inputs, seed), None, inputs) for seed in range(6)]

    first, second = linears(512, 192), linears(192, 256)
    compiled, plain = dispatch.pack_experts(first, second, gating), PlainExperts(first, second, gating)
    assert type(compiled) is not type(plain)
    for rows in (1, 5, 40):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 192, generator=generator) * 0.1
        index = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
        scores = torch.rand(rows, 2, generator=generator)
        together, expected = compiled(x, index, scores), plain(x, index, scores)
        assert (together - expected).norm() < 1e-3 * expected.norm()
        assert torch.equal(compiled(x[:1], index[:1], scores[:1]), together[:1])
