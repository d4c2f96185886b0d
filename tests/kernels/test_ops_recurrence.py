"""Short convolutions, linear recurrences and gated norms against plain torch, and what results may not depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import gated_norm, recurrence
from swarm_kernels.ops.base.gated_norm import GatedNorm
from swarm_kernels.ops.base.recurrence import MAX_TAPS, Convolution, Recurrence, State, StateRows

SIZES = [(2, 4, 16, 32), (1, 3, 7, 20), (4, 4, 128, 128), (2, 2, 64, 65)]  # key heads, heads, keys, values of a head
DTYPES = [torch.float32, torch.bfloat16]


def random_rows(rows: int, starts: int, seed: int) -> StateRows:
    """A forest: runs, branches and several sessions, in any order of the rows."""
    rng = random.Random(seed)
    order = rng.sample(range(rows), rows)
    parent = [0] * rows
    for place, row in enumerate(order):
        fresh = place == 0 or rng.random() < 0.2
        parent[row] = -1 - rng.randrange(starts) if fresh else rng.choice((order[place - 1], rng.choice(order[:place])))
    return StateRows.of(order, parent, starts, [rng.randrange(rows) for _ in range(4)])


def chain(rows: int) -> StateRows:
    return StateRows.of(range(rows), range(-1, rows - 1), 1, [rows - 1])


def random_recurrence(
    rows: int, size: tuple[int, int, int, int], by_key: bool, corrects: bool, values_first: bool, seed: int
) -> tuple[Recurrence, list[State]]:
    groups, heads, keys, values = size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mixed = normal(rows, groups * keys + 5)  # rows that do not lie next to each other
    how = Recurrence(
        mixed[:, : groups * keys].view(rows, groups, keys),
        normal(rows, groups, keys),
        normal(rows, heads, values),
        -normal(rows, heads, *([keys] if by_key else [])).abs(),
        normal(rows, heads).sigmoid() if seed % 3 else None,
        None if corrects else normal(heads),
        keys**-0.5,
        1e-6 if corrects else None,
        corrects,
        values_first,
    )
    shape = (heads, values, keys) if values_first else (heads, keys, values)
    return how, [None, normal(*shape), normal(*shape)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
def test_recurrences_match_the_reference(
    isa: str, size: tuple[int, int, int, int], by_key: bool, corrects: bool, values_first: bool
) -> None:
    for seed, rows in enumerate((1, 5, 60)):
        how, starts = random_recurrence(rows, size, by_key, corrects, values_first, seed)
        plan = random_rows(rows, len(starts), seed)
        output, saved = dispatch.recur(how, plan, starts)
        expected, states = recurrence.recur(how, plan, starts)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=3e-5)
        torch.testing.assert_close(saved, states, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(8, 4), (33, 3), (2000, 4), (64, 1), (17, MAX_TAPS)])
def test_convolutions_match_the_reference(isa: str, channels: int, taps: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(channels)
    weight, bias = torch.randn(taps, channels, generator=generator), torch.randn(channels, generator=generator)
    starts = [None, *(torch.randn(2, channels, taps, generator=generator).to(dtype).unbind())]
    for rows in (1, 40):
        plan = random_rows(rows, len(starts), rows)
        x = torch.randn(channels, rows, generator=generator).to(dtype).T  # strided
        for how in (Convolution(weight, bias, silu=True), Convolution(weight, None, silu=False)):
            output, saved = dispatch.convolve(x, how, plan, starts)
            expected, states = recurrence.convolve(x, how, plan, starts)
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(output, expected, rtol=bound, atol=bound)
            assert all(map(torch.equal, saved, states))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("groups", "size"), [(1, 128), (4, 40), (3, 7)])
@pytest.mark.parametrize("kind", [{"rounds": True}, {"sigmoid": True}, {"gate_first": True}], ids=str)
def test_gated_norms_match_the_reference(
    isa: str, dtype: torch.dtype, groups: int, size: int, kind: dict[str, bool]
) -> None:
    generator = torch.Generator().manual_seed(size)
    x, gate = torch.randn(2, 9, groups * size, generator=generator).to(dtype).unbind()
    for width in (size, groups * size):
        how = GatedNorm(torch.randn(width, generator=generator).to(dtype).float(), size, 1e-5, **kind)
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        expected = gated_norm.norm_gated(x, gate, how)
        torch.testing.assert_close(dispatch.norm_gated(x, gate, how), expected, rtol=bound, atol=bound)
        alone = torch.cat([dispatch.norm_gated(x[i : i + 1], gate[i : i + 1], how) for i in range(9)])
        assert torch.equal(alone, dispatch.norm_gated(x, gate, how))


def test_softplus_is_torchs(isa: str) -> None:
    x = torch.linspace(-30, 30, 1001)
    torch.testing.assert_close(dispatch.softplus(x), torch.nn.functional.softplus(x), rtol=1e-6, atol=1e-30)
    assert torch.equal(torch.cat([dispatch.softplus(part) for part in x.split(7)]), dispatch.softplus(x))


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
def test_a_text_in_pieces_is_the_text_bit_for_bit(isa: str, by_key: bool, corrects: bool) -> None:
    """Whatever is beside it, on one thread and on several; a branch of a tree likewise."""
    how, (_, start, other) = random_recurrence(48, (2, 6, 24, 40), by_key, corrects, by_key, 1)

    def rows(chosen: list[int]) -> Recurrence:
        parts = {name: getattr(how, name) for name in ("query", "key", "value", "decay", "beta")}
        return replace(how, **{name: None if part is None else part[chosen] for name, part in parts.items()})

    whole, (end,) = dispatch.recur(how, chain(48), [start])
    for threads in (1, 3):
        dispatch.set_threads(threads)
        state: State = start
        for begin, stop in ((0, 1), (1, 20), (20, 21), (21, 48)):
            mine, beside = list(range(begin, stop)), [47 - begin]
            parent = [-1, *range(stop - begin - 1), -2]
            plan = StateRows.of([stop - begin, *range(stop - begin)], parent, 2, [stop - begin - 1])
            output, (state,) = dispatch.recur(rows(mine + beside), plan, [state, other])
            assert torch.equal(output[:-1], whole[begin:stop])
        assert torch.equal(state, end)
        tree = StateRows.of(range(4), [-1, 0, 0, 2], 1, [3])  # rows 0, 7, 1, 2 of the text: 7 is another branch
        output, _ = dispatch.recur(rows([0, 7, 1, 2]), tree, [start])
        assert torch.equal(output[[0, 2, 3]], whole[:3])


def test_what_does_not_fit_is_refused() -> None:
    how, starts = random_recurrence(3, (1, 2, 8, 8), False, True, False, 1)
    for order, parent, saved in (
        ([0, 1, 2], [-1, 2, 1], [0]),  # after a row that comes later
        ([0, 1, 2], [-4, 0, 0], [0]),  # a start that is not there
        ([0, 1, 2], [-1, 0, 3], [0]),
        ([0, 1, 1], [-1, 0, 0], [0]),
        ([0, 1, 2], [-1, 0, 0], [3]),
        ([0, 1, 2], [-1, 0, 0], [-1]),
    ):
        with pytest.raises(KernelError, match="out of order"):
            dispatch.recur(how, StateRows.of(order, parent, 3, saved), starts)
    plan = random_rows(3, 3, 0)
    for wrong in (
        {"query": how.query[:2]},
        {"decay": how.decay[:, :1]},
        {"beta": torch.zeros(3, 1)},
        {"skip": torch.zeros(3)},
        {"values_first": True, "value": torch.zeros(3, 2, 9)},
    ):
        with pytest.raises(KernelError):
            dispatch.recur(replace(how, **wrong), plan, starts)
    with pytest.raises(KernelError):
        dispatch.recur(how, plan, starts[:2])
    for weight, x in ((torch.zeros(17, 4), torch.zeros(3, 4)), (torch.zeros(3, 4), torch.zeros(2, 4))):
        with pytest.raises(KernelError):
            dispatch.convolve(x, Convolution(weight, None, silu=False), plan, [None] * 3)
    with pytest.raises(KernelError):
        dispatch.norm_gated(torch.zeros(2, 9), torch.zeros(2, 9), GatedNorm(torch.ones(4), 4, 1e-5))
