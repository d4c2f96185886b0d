"""The packed linear against fp64, and its promise: a row's result depends on neither its neighbours nor the threads."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((64, 64), (960, 576), (40, 33), (17, 250), (1, 16))  # [N, K]: whole blocks, padded ones, an odd K


def random_linear(
    outputs: int, inputs: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[dispatch.Linear, torch.Tensor, torch.Tensor]:
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    return dispatch.pack_linear(weight, bias), weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_linear_matches_fp64(isa: str, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    linear, weight, bias = random_linear(outputs, inputs, dtype, generator)
    for rows in (1, 2, 3, 7, 12, 13, 50):
        x = torch.randn(rows, inputs, generator=generator).to(dtype).float()
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-5 * inputs**0.5)


def summed_in_pairs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16's sums one by one: of each pair of inputs the second is added first."""
    x, weight = x.bfloat16().float(), weight.float()
    total = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(0, x.shape[1], 2):
        for i in (k + 1, k):
            total = total + x[:, i, None] * weight[:, i]
    return total


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (960, 576), (40, 34), (17, 250), (1, 16)])
def test_bf16_comes_to_the_same_bits_on_every_instruction_set(isa: str, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    linear, weight, bias = random_linear(outputs, inputs, torch.bfloat16, generator)
    x = torch.randn(67, inputs, generator=generator) * torch.randn(67, 1, generator=generator).exp()
    expected = summed_in_pairs(x, weight) + bias.float()
    for rows in (1, 2, 3, 7, 12, 13, 17, 33, 67):
        assert torch.equal(linear(x[:rows]), expected[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_spoils_its_row_only(isa: str, dtype: torch.dtype) -> None:
    linear, _, _ = random_linear(64, 200, dtype, torch.Generator().manual_seed(2))
    x = torch.randn(20, 200, generator=torch.Generator().manual_seed(3))
    expected = linear(x)
    payload = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a NaN whose upper half is infinity's
    for row, value in ((1, float("nan")), (2, payload), (3, float("inf")), (4, -float("inf"))):
        x[row, 70] = value
        assert not linear(x)[row].isfinite().any()
    assert linear(x)[1:3].isnan().all()
    assert torch.equal(linear(x)[5:], expected[5:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_each_other_or_on_threads(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    linear, _, _ = random_linear(200, 96, dtype, generator)
    x = torch.randn(131, 96, generator=generator)
    together = linear(x)
    for rows in range(1, 20):
        assert torch.equal(linear(x[:rows]), together[:rows])
    assert torch.equal(torch.cat([linear(row[None]) for row in x]), together)
    for count in (1, 3):
        dispatch.set_threads(count)
        assert torch.equal(linear(x), together)


def test_result_has_the_dtype_of_the_input() -> None:
    linear = dispatch.pack_linear(torch.ones(16, 8, dtype=torch.bfloat16))
    assert linear(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert linear(torch.ones(0, 8)).shape == (0, 16)


def test_half_weights_take_torch() -> None:
    weight = torch.randn(32, 48).half()
    linear = dispatch.pack_linear(weight)
    assert not isinstance(linear, PackedLinear)
    x = torch.randn(3, 48)
    torch.testing.assert_close(linear(x), x @ weight.float().T, rtol=2e-2, atol=2e-2)


def test_packing_says_its_size_and_shape() -> None:
    linear = dispatch.pack_linear(torch.zeros(40, 32, dtype=torch.bfloat16))
    assert (linear.in_features, linear.out_features) == (32, 40)
    assert linear.nbytes >= 40 * 32 * 2


@pytest.mark.parametrize(
    ("weight", "bias"), [(torch.zeros(4), None), (torch.zeros(4, 4), torch.zeros(3))], ids=["vector", "bias"]
)
def test_misshapen_weights_are_refused(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(KernelError):
        dispatch.pack_linear(weight, bias)


@pytest.mark.parametrize("x", [torch.zeros(3, 9), torch.zeros(8), torch.zeros(1, 2, 8)], ids=lambda x: str(x.shape))
def test_misshapen_rows_are_refused(isa: str, x: torch.Tensor) -> None:
    linear = dispatch.pack_linear(torch.zeros(16, 8))
    with pytest.raises(KernelError):
        linear(x)


def test_rms_norm_matches_torch(isa: str) -> None:
    x, weight = torch.randn(5, 3, 100), torch.rand(100)
    expected = torch.nn.functional.rms_norm(x, (100,), weight, 1e-5)
    torch.testing.assert_close(dispatch.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-5)
    half = dispatch.rms_norm(x.bfloat16(), weight, 1e-5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=2e-2, atol=2e-2)
