"""Mixtures of experts: the compiled op against plain torch, whatever the rows chose."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels.device.device import INT4
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.experts import Gating, GatingKind, PlainExperts
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.runtime.weight_reader import packs_of

SILU = Gating()
GPT_OSS = Gating(alpha=1.702, limit=0.7, shift=1.0)
GATINGS = {
    "silu": SILU,
    "gpt-oss": GPT_OSS,
    "gelu": Gating(GatingKind.GEGLU_TANH),
    "relu squared": Gating(GatingKind.RELU_SQUARED),
}
HIDDEN, WIDTH, COUNT, CHOSEN = 96, 40, 12, 3  # a width that is no multiple of a vector, nor of a group


def packed_by(dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packs = packs_of(dtype)
    pack = packs.plain if packs.four_bits is None else packs.four_bits.rounded
    return pack(weight.to(dtype) if dtype.is_floating_point else weight, bias)


def random_experts(
    dtype: torch.dtype, gating: Gating = SILU, *, width: int = WIDTH, hidden: int = HIDDEN, count: int = COUNT
) -> tuple[list[Linear], list[Linear]]:
    generator = torch.Generator().manual_seed(7)

    def linear(outputs: int, inputs: int) -> Linear:
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return packed_by(dtype, weight, torch.randn(outputs, generator=generator) * 0.3)

    wide = width * (2 if gating.has_gates else 1)
    return [linear(wide, hidden) for _ in range(count)], [linear(hidden, width) for _ in range(count)]


def random_rows(rows: int, count: int = COUNT, chosen: int = CHOSEN, hidden: int = HIDDEN) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    index = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(rows)])
    scores = torch.rand(rows, chosen, generator=generator)
    return [torch.randn(rows, hidden, generator=generator), index, scores]


@pytest.mark.parametrize("gating", GATINGS.values(), ids=GATINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4], ids=str)
def test_compiled_and_plain_torch_agree(isa: str, dtype: torch.dtype, gating: Gating) -> None:
    """Both run the same packed linears; activations of the second are rounded, so single numbers may round apart."""
    first, second = random_experts(dtype, gating)
    compiled, plain = dispatch.pack_experts(first, second, gating), PlainExperts(first, second, gating)
    assert type(compiled) is not type(plain)
    assert compiled.nbytes == plain.nbytes
    for rows in (1, 2, 5, 16, 70):
        x, index, scores = random_rows(rows)
        expected = plain(x, index, scores)
        distance = (compiled(x, index, scores) - expected).norm() / expected.norm()
        assert distance < (1e-5 if dtype == torch.float32 else 3e-3)


def test_plain_torch_computes_what_the_definition_says() -> None:
    for gating in (SILU, GPT_OSS):
        first, second = random_experts(torch.float32, gating)
        x, index, scores = random_rows(4)
        expected = torch.zeros_like(x)
        for row in range(4):
            for expert, score in zip(index[row].tolist(), scores[row], strict=True):
                inner = first[expert](x[row][None])
                gate, up = inner[:, :WIDTH].clamp(max=gating.limit), inner[:, WIDTH:].clamp(-gating.limit, gating.limit)
                expected[row] += score * second[expert](gate * (gate * gating.alpha).sigmoid() * (up + gating.shift))[0]
        torch.testing.assert_close(PlainExperts(first, second, gating)(x, index, scores), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4], ids=str)
def test_rows_do_not_depend_on_each_other_or_on_threads(isa: str, dtype: torch.dtype) -> None:
    experts = dispatch.pack_experts(*random_experts(dtype), SILU)
    x, index, scores = random_rows(50)
    together = experts(x, index, scores)
    for rows in (1, 3, 17):
        assert torch.equal(experts(x[:rows], index[:rows], scores[:rows]), together[:rows])
    alone = [experts(x[i : i + 1], index[i : i + 1], scores[i : i + 1]) for i in range(50)]
    assert torch.equal(torch.cat(alone), together)
    for threads in (1, 3):
        dispatch.set_threads(threads)
        assert torch.equal(experts(x, index, scores), together)


def test_many_rows_go_in_passes(isa: str) -> None:
    experts = dispatch.pack_experts(*random_experts(torch.int8), SILU)
    x, index, scores = random_rows(1500)
    assert torch.equal(experts(x, index, scores)[1490:], experts(x[1490:], index[1490:], scores[1490:]))


def test_all_rows_may_choose_one_expert_and_one_expert_may_be_of_another_format(isa: str) -> None:
    first, second = random_experts(INT4)
    wide, narrow = random_experts(torch.int8)
    first[4], second[9] = wide[4], narrow[9]
    compiled, plain = dispatch.pack_experts(first, second, SILU), PlainExperts(first, second, SILU)
    x, _, _ = random_rows(30)
    for expert in (0, 4, 9, 11):
        index, scores = torch.full((30, 1), expert), torch.ones(30, 1)
        expected = plain(x, index, scores)
        assert (compiled(x, index, scores) - expected).norm() < 3e-3 * expected.norm()


def test_what_is_no_number_spoils_its_row_only(isa: str) -> None:
    experts = dispatch.pack_experts(*random_experts(torch.int8), SILU)
    x, index, scores = random_rows(9)
    expected = experts(x, index, scores)
    x[4, 3] = float("nan")
    spoiled = experts(x, index, scores)
    assert spoiled[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[others], expected[others])


@pytest.mark.parametrize("chosen", [-1, COUNT, 1 << 40])
def test_experts_that_are_not_there_are_refused(chosen: int) -> None:
    first, second = random_experts(torch.float32)
    x, index, scores = random_rows(3)
    index[1, 2] = chosen
    for experts in (dispatch.pack_experts(first, second, SILU), PlainExperts(first, second, SILU)):
        with pytest.raises(KernelError, match="expert"):
            experts(x, index, scores)
        with pytest.raises(KernelError, match="experts of 96 inputs"):
            experts(x[:, :8], index, scores)
        with pytest.raises(KernelError, match="experts of 96 inputs"):
            experts(x, index[:2], scores)
    with pytest.raises(KernelError, match="no experts of one shape"):
        dispatch.pack_experts(first, list(reversed(first)), SILU)


def test_no_rows() -> None:
    experts = dispatch.pack_experts(*random_experts(torch.bfloat16), SILU)
    out = experts(torch.empty(0, HIDDEN), torch.empty(0, CHOSEN, dtype=torch.int64), torch.empty(0, CHOSEN))
    assert out.shape == (0, HIDDEN)
