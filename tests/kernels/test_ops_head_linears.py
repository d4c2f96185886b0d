"""Linear layers of single heads against plain torch, and what their results may not depend on."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.head_linears import PlainHeadLinears

DTYPES = [torch.float32, torch.bfloat16]


def random_weight(heads: int, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(heads, outputs, inputs, generator=torch.Generator().manual_seed(inputs)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(16, 512, 128), (3, 128, 512), (5, 16, 6), (1, 48, 64)])
@pytest.mark.parametrize("rows", [1, 2, 7, 150])
def test_heads_have_linear_layers_of_their_own(
    isa: str, dtype: torch.dtype, heads: int, outputs: int, inputs: int, rows: int
) -> None:
    weight = random_weight(heads, outputs, inputs, dtype)
    x = torch.randn(heads, rows, inputs + 3, generator=torch.Generator().manual_seed(1)).transpose(0, 1)[..., :inputs]
    packed = dispatch.pack_head_linears(weight.transpose(1, 2).contiguous().transpose(1, 2))
    assert not isinstance(packed, PlainHeadLinears)
    whole = torch.full((rows, heads, outputs + 5), 7.0)
    packed(x, whole[..., :outputs])
    rounded = x.to(dtype).double()
    expected = torch.einsum("rhi,hoi->rho", rounded, weight.double())
    torch.testing.assert_close(whole[..., :outputs].double(), expected, rtol=2e-5, atol=2e-5 * inputs**0.5)
    assert (whole[..., outputs:] == 7).all()
    assert torch.equal(packed.matrix(), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_is_the_row_among_others(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit, on one thread and on several."""
    packed = dispatch.pack_head_linears(random_weight(7, 64, 96, dtype))
    x = torch.randn(40, 7, 96, generator=torch.Generator().manual_seed(2))
    together = torch.empty(40, 7, 64)
    packed(x, together)
    for count in (1, 3):
        dispatch.set_threads(count)
        for row in (0, 17, 39):
            alone = torch.empty(1, 7, 64)
            packed(x[row : row + 1], alone)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bf16_in_and_out(isa: str, dtype: torch.dtype) -> None:
    weight = random_weight(4, 32, 48, dtype)
    packed, plain = dispatch.pack_head_linears(weight), PlainHeadLinears(weight)
    x = torch.randn(6, 4, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    ours, theirs = torch.empty(2, 6, 4, 32, dtype=torch.bfloat16).unbind()
    packed(x, ours)
    plain(x, theirs)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)
    packed(x[:0], ours[:0])


@pytest.mark.parametrize("shape", [(2, 12, 8), (2, 16, 7)])
def test_other_sizes_take_plain_torch(shape: tuple[int, int, int]) -> None:
    weight = random_weight(*shape, torch.float32)
    plain = dispatch.pack_head_linears(weight)
    assert isinstance(plain, PlainHeadLinears)
    assert plain.weight is weight
    x, out = torch.ones(3, 2, shape[2]), torch.empty(3, 2, shape[1])
    plain(x, out)
    torch.testing.assert_close(out, weight.sum(-1).expand(3, -1, -1))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError):
        dispatch.pack_head_linears(torch.zeros(4, 4))
    packed = dispatch.pack_head_linears(torch.zeros(2, 16, 8))
    for x, out in (((3, 2, 6), (3, 2, 16)), ((3, 1, 8), (3, 2, 16)), ((3, 2, 8), (2, 2, 16)), ((3, 2, 8), (3, 2, 8))):
        with pytest.raises((KernelError, RuntimeError)):
            packed(torch.zeros(x), torch.zeros(out))
