"""Linears of 8 and 4 bits alike: every instruction set computes the twin's bits, whatever shares the work."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int4_linear, int8_linear
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear

SHAPES = ((64, 64), (960, 576), (40, 33), (17, 250), (1, 16), (48, 1537))  # [N, K]: padded blocks, quads and groups
BITS = pytest.mark.parametrize("bits", [8, 4])
TWINS = {8: int8_linear.quantize_linear, 4: int4_linear.quantize_linear}


def random_pair(
    outputs: int, inputs: int, bits: int, bias: bool = True
) -> tuple[dispatch.Linear, dispatch.Linear, torch.Tensor]:
    """The same weights packed and plain, and rows of very different sizes to multiply."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    biases = torch.randn(outputs, generator=generator) if bias else None
    x = torch.randn(67, inputs, generator=generator) * torch.randn(67, 1, generator=generator).exp()
    packed = dispatch.quantize_linear(weight, biases, bits=bits)
    assert isinstance(packed, PackedLinear)
    return packed, TWINS[bits](weight, biases), x


@BITS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_every_instruction_set_gives_the_same_bits(isa: str, outputs: int, inputs: int, bits: int, bias: bool) -> None:
    packed, plain, x = random_pair(outputs, inputs, bits, bias)
    expected = plain(x)
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 67):
        assert torch.equal(packed(x[:rows]), expected[:rows])


@BITS
def test_a_row_alone_and_among_others_on_any_number_of_threads(isa: str, bits: int) -> None:
    packed, _, x = random_pair(200, 96, bits)
    x[5] *= 1e4
    together = packed(x)
    assert torch.equal(torch.cat([packed(row[None]) for row in x]), together)
    for count in (1, 3):
        dispatch.set_threads(count)
        assert torch.equal(packed(x), together)


@BITS
def test_what_is_no_number_spoils_its_row_only(isa: str, bits: int) -> None:
    packed, _, x = random_pair(64, 200, bits)
    expected = packed(x)
    for row, value in ((1, float("nan")), (3, float("inf")), (4, -float("inf"))):
        x[row, 70] = value
        assert not packed(x)[row].isfinite().any()
    assert torch.equal(packed(x)[5:], expected[5:])


@BITS
def test_misshapen_weights_are_refused(bits: int) -> None:
    with pytest.raises(KernelError, match="cannot be packed"):
        dispatch.quantize_linear(torch.zeros(4, 4), torch.zeros(3), bits=bits)


def test_other_widths_are_refused() -> None:
    with pytest.raises(KernelError, match="3 bits"):
        dispatch.quantize_linear(torch.zeros(4, 4), bits=3)
