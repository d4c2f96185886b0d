"""Linears of 8 and 4 bits alike: every instruction set computes the twin's bits, whatever shares the work."""

from __future__ import annotations

import pytest
import torch
from code_cases import random_codes, random_fp8, summed_in_groups

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int4_linear, int8_linear
from swarm_kernels.ops.base.codebook_linear import CodebookLinear, CodeFormat
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear

BITS = {"int8": 8, "int4": 4}
ROUNDED = ((64, 64), (960, 576), (40, 33), (17, 250), (1, 16), (48, 1537))  # [N, K]: padded blocks, quads and groups
UNITS = ((64, 1), (960, 2), (40, 1), (17, 3), (1, 2))  # [N, K / the least of its codes]
CASES = (
    *((kind, *shape) for kind in BITS for shape in ROUNDED),
    *((form.value, outputs, units * form.inputs) for form in CodeFormat for outputs, units in UNITS),
    *(("fp8", *shape) for shape in ((64, 128), (960, 576), (40, 260), (17, 64), (1, 4))),
)
KINDS = pytest.mark.parametrize("kind", [*BITS, *(form.value for form in CodeFormat), "fp8"])


class Fp8Sums:
    """What the kernels do with E4M3, one sum after another; plain torch keeps no order."""

    def __init__(self, outputs: int, inputs: int, bias: torch.Tensor | None) -> None:
        self.weights = random_fp8(outputs, inputs)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = summed_in_groups(self.weights, x)
        return total if self.bias is None else total + self.bias


def random_pair(
    kind: str, outputs: int, inputs: int, bias: bool = True
) -> tuple[dispatch.Linear, dispatch.Linear | Fp8Sums, torch.Tensor]:
    """The same weights packed and plain, and rows of very different sizes to multiply."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    biases = torch.randn(outputs, generator=generator) if bias else None
    x = torch.randn(67, inputs, generator=generator) * torch.randn(67, 1, generator=generator).exp()
    plain: dispatch.Linear | Fp8Sums
    if kind in BITS:
        packed = dispatch.quantize_linear(weight, biases, bits=BITS[kind])
        plain = (int8_linear if kind == "int8" else int4_linear).quantize_linear(weight, biases)
    elif kind == "fp8":
        plain = Fp8Sums(outputs, inputs, biases)
        packed = dispatch.pack_stored(plain.weights, biases, inputs)
    else:
        plain = CodebookLinear(random_codes(CodeFormat(kind), outputs, inputs), biases)
        packed = dispatch.pack_stored(plain.weights, biases, inputs)
    assert isinstance(packed, PackedLinear)
    return packed, plain, x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "outputs", "inputs"), CASES)
def test_every_instruction_set_gives_the_same_bits(isa: str, kind: str, outputs: int, inputs: int, bias: bool) -> None:
    packed, plain, x = random_pair(kind, outputs, inputs, bias)
    expected = plain(x)
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 67):
        assert torch.equal(packed(x[:rows]), expected[:rows])


@KINDS
def test_a_row_alone_and_among_others_on_any_number_of_threads(isa: str, kind: str) -> None:
    packed, _, x = random_pair(kind, 200, 256)
    x[5] *= 1e4
    together = packed(x)
    assert torch.equal(torch.cat([packed(row[None]) for row in x]), together)
    for count in (1, 3):
        dispatch.set_threads(count)
        assert torch.equal(packed(x), together)


@KINDS
def test_what_is_no_number_spoils_its_row_only(isa: str, kind: str) -> None:
    packed, _, x = random_pair(kind, 64, 256)
    expected = packed(x)
    for row, value in ((1, float("nan")), (3, float("inf")), (4, -float("inf"))):
        x[row, 70] = value
        assert not packed(x)[row].isfinite().any()
    assert torch.equal(packed(x)[5:], expected[5:])


@pytest.mark.parametrize("bits", BITS.values())
def test_misshapen_weights_are_refused(bits: int) -> None:
    with pytest.raises(KernelError, match="cannot be packed"):
        dispatch.quantize_linear(torch.zeros(4, 4), torch.zeros(3), bits=bits)


def test_other_widths_are_refused() -> None:
    with pytest.raises(KernelError, match="3 bits"):
        dispatch.quantize_linear(torch.zeros(4, 4), bits=3)
