"""4-bit linears: how far off they are, and weights that had 4 bits stay what they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import KernelError
from swarm_kernels.models.gguf_types.dequant import dequantize
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import exact_linear, int4_linear

Q4_1 = 3  # ggml's number of the type


def test_the_largest_sums_fit(isa: str) -> None:
    """Products of 127 and 15 throughout, of either sign."""
    weight = torch.ones(32, 640)
    weight[:, ::32] = 0.0
    packed = dispatch.quantize_linear(weight, bits=4)
    for x in (torch.ones(1, 640), -torch.ones(1, 640)):
        torch.testing.assert_close(packed(x), x @ weight.T, rtol=1e-3, atol=0)


def test_the_error_is_that_of_4_bits(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(512, 768, generator=generator), torch.randn(20, 768, generator=generator)
    exact = x @ weight.T
    assert (dispatch.quantize_linear(weight, bits=4)(x) - exact).norm() / exact.norm() < 0.09
    held = exact_linear.rounded_linear(weight)(x)
    assert (dispatch.quantize_linear(weight, bits=4)(x) - held).norm() / held.norm() < 0.02


@given(st.integers(0, 1 << 30), st.integers(1, 40), st.integers(1, 5))
def test_weights_of_a_q4_1_file_are_taken_over_unchanged(seed: int, outputs: int, blocks: int) -> None:
    """As llama.cpp writes them: the least weight of a block is 0 and the largest 15."""
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (outputs * blocks, 20), generator=generator, dtype=torch.uint8)
    bytes_[:, 4] = 0xF0
    ends = torch.randn(outputs * blocks, 2, generator=generator) * torch.tensor([0.01, 0.1])
    bytes_[:, :4] = torch.stack((ends[:, 0].abs() + 1e-4, ends[:, 1]), 1).half().view(torch.uint8)
    weight = dequantize(bytes_.flatten().numpy(), Q4_1, (outputs, blocks * 32))
    ids = torch.arange(outputs).flip(0)
    assert torch.equal(dispatch.quantize_linear(weight, bits=4).embedding_rows(ids), weight[ids])


def test_rows_of_weights_are_what_is_multiplied() -> None:
    weight, ids = torch.randn(40, 33), torch.tensor([39, 0, 17, 17])
    packed, plain = dispatch.quantize_linear(weight, bits=4), int4_linear.quantize_linear(weight)
    assert torch.equal(packed.embedding_rows(ids), plain.embedding_rows(ids))
    assert packed.embedding_rows(ids[:0]).shape == (0, 33)
    step = (weight.amax(1) - weight.amin(1)) / 15
    assert ((packed.embedding_rows(ids) - weight[ids]).abs() <= 0.51 * step[ids, None] + 2e-3).all()


def test_memory_is_5_16ths_of_bf16() -> None:
    weight = torch.randn(1024, 512)
    assert dispatch.quantize_linear(weight, bits=4).nbytes == dispatch.pack_linear(weight.bfloat16()).nbytes * 5 / 16


@pytest.mark.parametrize("value", [1e6, -1e6, float("nan"), float("inf")])
def test_weights_that_fp16_cannot_hold_are_refused(value: float) -> None:
    weight = torch.zeros(4, 40)
    weight[2, 7] = value
    with pytest.raises(KernelError, match="4 bits"):
        dispatch.quantize_linear(weight, bits=4)
