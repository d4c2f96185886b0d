"""8-bit linears: how far off they are, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int8_linear


def test_the_error_is_that_of_8_bits(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(512, 768, generator=generator), torch.randn(20, 768, generator=generator)
    x[:, 7] *= 50  # an outlier costs its group of 64, not the row
    exact = x @ weight.T
    error = (dispatch.quantize_linear(weight)(x) - exact).norm() / exact.norm()
    assert error < 0.025


def test_rows_of_weights_are_what_is_multiplied() -> None:
    ids = torch.tensor([39, 0, 17, 17])
    weight = torch.randn(40, 33)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dispatch.pack_linear(weight.to(dtype)).embedding_rows(ids).to(dtype), weight[ids].to(dtype))
    packed = dispatch.quantize_linear(weight)
    assert torch.equal(packed.embedding_rows(ids), int8_linear.quantize_linear(weight).embedding_rows(ids))
    assert (packed.embedding_rows(ids) - weight[ids]).abs().max() <= weight.abs().max() / 127


def test_memory_is_half_of_bf16() -> None:
    weight = torch.randn(1024, 512)
    assert dispatch.quantize_linear(weight).nbytes < 0.52 * dispatch.pack_linear(weight.bfloat16()).nbytes


def test_rows_too_long_to_sum_exactly_are_refused() -> None:
    with pytest.raises(KernelError, match="inputs"):
        dispatch.quantize_linear(torch.zeros(1, int8_linear.MAX_INPUTS + 1))


def test_the_least_numbers_are_zeros(isa: str) -> None:
    packed = dispatch.quantize_linear(torch.randn(64, 200))
    assert torch.equal(packed(torch.full((1, 200), 1e-38)), packed(torch.zeros(1, 200)))
