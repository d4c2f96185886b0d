"""8-bit linears: every instruction set computes the twin's bits, whatever rows and threads share the work."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels import ops, quantised
from swarm_kernels.packed import PackedLinear

SHAPES = ((64, 64), (960, 576), (40, 33), (17, 250), (1, 16), (48, 1537))  # [N, K]: padded blocks, quads and groups


def random_pair(outputs: int, inputs: int, bias: bool = True) -> tuple[ops.Linear, quantised.Int8Linear, torch.Tensor]:
    """The same weights packed and plain, and rows of very different sizes to multiply."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    biases = torch.randn(outputs, generator=generator) if bias else None
    x = torch.randn(67, inputs, generator=generator) * torch.randn(67, 1, generator=generator).exp()
    packed = ops.quantise_linear(weight, biases)
    assert isinstance(packed, PackedLinear)
    return packed, quantised.quantise_linear(weight, biases), x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_every_instruction_set_gives_the_same_bits(isa: str, outputs: int, inputs: int, bias: bool) -> None:
    packed, plain, x = random_pair(outputs, inputs, bias)
    expected = plain(x)
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 67):
        assert torch.equal(packed(x[:rows]), expected[:rows])


def test_rows_do_not_depend_on_each_other_or_on_threads(isa: str) -> None:
    packed, _, x = random_pair(200, 96)
    x[5] *= 1e4
    together = packed(x)
    assert torch.equal(torch.cat([packed(row[None]) for row in x]), together)
    for count in (1, 3):
        ops.set_threads(count)
        assert torch.equal(packed(x), together)


def test_the_error_is_that_of_8_bits(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(512, 768, generator=generator), torch.randn(20, 768, generator=generator)
    x[:, 7] *= 50  # an outlier costs its group of 64, not the row
    exact = x @ weight.T
    error = (ops.quantise_linear(weight)(x) - exact).norm() / exact.norm()
    assert error < 0.025


def test_what_is_no_number_spoils_its_row_only(isa: str) -> None:
    packed, _, x = random_pair(64, 200)
    expected = packed(x)
    for row, value in ((1, float("nan")), (3, float("inf")), (4, -float("inf"))):
        x[row, 70] = value
        assert not packed(x)[row].isfinite().any()
    assert torch.equal(packed(x)[5:], expected[5:])
    tiny = torch.full((1, 200), 1e-38)
    assert torch.equal(packed(tiny), packed(torch.zeros(1, 200)))


def test_rows_of_weights_are_what_is_multiplied() -> None:
    ids = torch.tensor([39, 0, 17, 17])
    weight = torch.randn(40, 33)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(ops.pack_linear(weight.to(dtype)).rows(ids).to(dtype), weight[ids].to(dtype))
    packed = ops.quantise_linear(weight)
    assert torch.equal(packed.rows(ids), quantised.quantise_linear(weight).rows(ids))
    assert (packed.rows(ids) - weight[ids]).abs().max() <= weight.abs().max() / 127


def test_memory_is_half_of_bf16() -> None:
    weight = torch.randn(1024, 512)
    assert ops.quantise_linear(weight).nbytes < 0.52 * ops.pack_linear(weight.bfloat16()).nbytes


def test_rows_too_long_to_sum_exactly_are_refused() -> None:
    with pytest.raises(KernelError, match="inputs"):
        ops.quantise_linear(torch.zeros(1, quantised.MAX_INPUTS + 1))
    with pytest.raises(KernelError, match="cannot be packed"):
        ops.quantise_linear(torch.zeros(4, 4), torch.zeros(3))
