"""Paged tree attention against the plain-torch reference on random batches, and what its results may not depend on."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    Part,
    chain,
    make_plan,
    random_blocks,
    random_tree,
    star,
    take_rows,
)

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.torch_reference import REFERENCE, append

pytestmark = pytest.mark.slow

# Query heads, KV heads, head size; with 112 heads to one, a single row is more than a tile of rows usually is.
HEADS = ((9, 3, 64), (32, 8, 128), (4, 4, 32), (8, 1, 256), (6, 2, 80), (112, 1, 16))


def random_part(generator: torch.Generator) -> Part:
    def below(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    committed = (0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, below(100), 128, 200 + below(400))[below(7)]
    kind = below(5)
    if kind == 0:
        return Part(committed, line=1)
    if kind == 1:
        return Part(committed, line=1 + below(70))
    shape = (chain, star, lambda n: random_tree(n, generator))[kind - 2]
    size = 1 + below(90)
    return Part(committed, tree=shape(size), old=below(size))


@functools.cache
def random_batch(seed: int) -> tuple[AttentionMetadata, int]:
    generator = torch.Generator().manual_seed(seed)
    sessions = 1 + int(torch.randint(5, (1,), generator=generator))
    return make_plan([random_part(generator) for _ in range(sessions)], generator)


Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_case(
    plan: AttentionMetadata, blocks: int, heads: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    queries, groups, dim = heads
    q, k, v = (torch.randn(plan.rows, h, dim, generator=generator) for h in (queries, groups, groups))
    return (q, k, v, *random_blocks(blocks, groups, dim, dtype, generator))


def copied(case: Case) -> Case:
    q, k, v, k_blocks, v_blocks = case
    return q, k, v, k_blocks.clone(), v_blocks.clone()


def assert_near(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """`dtype`: of the cache. Values near the middle of two bf16 numbers may rarely round the other way."""
    if dtype == torch.bfloat16:
        torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)
        assert ((out - expected).abs() <= 2e-5 * (1 + expected.abs())).float().mean() > 0.98
    else:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attend_matches_the_reference(isa: str, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    for seed in range(6):
        plan, blocks = random_batch(seed)
        case = random_case(plan, blocks, heads, dtype, seed)
        twin = copied(case)
        out = dispatch.attend(*case, plan, heads[2] ** -0.5)
        expected = REFERENCE.attend(*twin, plan, heads[2] ** -0.5)
        assert_near(out, expected, dtype)
        assert torch.equal(case[3], twin[3])
        assert torch.equal(case[4], twin[4])


@pytest.mark.parametrize("window", [None, 1, 16, 130])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_windows_and_caps_match_the_reference(isa: str, window: int | None, softcap: float | None) -> None:
    for seed in range(4):
        plan, blocks = random_batch(100 + seed)
        case = random_case(plan, blocks, (4, 2, 32), torch.float32, seed)
        expected = REFERENCE.attend(*copied(case), plan, 0.5, window, softcap)
        torch.testing.assert_close(dispatch.attend(*case, plan, 0.5, window, softcap), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 37, 128])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_chunks_and_sinks_match_the_reference(
    isa: str, chunk: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    sinks = torch.tensor([-3.0, 0.0, 4.0, 1000.0])
    for seed in range(4):
        plan, blocks = random_batch(100 + seed)
        case = random_case(plan, blocks, (4, 2, 32), dtype, seed)
        expected = REFERENCE.attend(*copied(case), plan, 0.5, None, softcap, chunk, sinks)
        out = dispatch.attend(*copied(case), plan, 0.5, None, softcap, chunk, sinks)
        assert_near(out, expected, dtype)
        assert torch.equal(out[:, 3], torch.zeros_like(out[:, 3]))  # all its weight is on the sink
        for row in range(0, plan.rows, 1 + plan.rows // 5):
            one = slice(row, row + 1)
            q, k, v, *cache = copied(case)
            alone = dispatch.attend(
                q[one], k[one], v[one], *cached(case, plan, *cache), take_rows(plan, [row]), 0.5, None, softcap, chunk,
                sinks,
            )  # fmt: skip
            assert torch.equal(alone[0], out[row])


def cached(
    case: Case, plan: AttentionMetadata, k_blocks: torch.Tensor, v_blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks with the keys and values of the whole batch."""
    append(case[1], case[2], k_blocks, v_blocks, plan.slot_mapping)
    return k_blocks, v_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_match_the_reference(isa: str, dtype: torch.dtype, window: int | None) -> None:
    """Contexts of several blocks of keys, and at the ends of blocks."""
    generator = torch.Generator().manual_seed(11)
    parts = [
        Part(2300, tree=random_tree(70, generator)),
        Part(1024, line=33),
        Part(128, tree=star(3)),
        Part(511, line=1),
    ]
    plan, blocks = make_plan(parts, generator)
    case = random_case(plan, blocks, (9, 3, 64), dtype, 11)
    expected = REFERENCE.attend(*copied(case), plan, 0.125, window)
    assert_near(dispatch.attend(*case, plan, 0.125, window), expected, dtype)


def test_forks_read_the_pages_they_share(isa: str) -> None:
    generator = torch.Generator().manual_seed(12)
    plan, blocks = make_plan([Part(200, tree=chain(5)), Part(170, tree=random_tree(40, generator))], generator)
    tables = plan.block_tables.clone()
    tables[1, :10] = tables[0, :10]
    plan = replace(plan, block_tables=tables)
    case = random_case(plan, blocks, (6, 2, 48), torch.bfloat16, 12)
    expected = REFERENCE.attend(*copied(case), plan, 0.2)
    assert_near(dispatch.attend(*case, plan, 0.2), expected, torch.bfloat16)


def test_a_row_alone_is_the_row_among_others(isa: str) -> None:
    """Bit for bit, on one thread and on several, with the context split over them and without."""
    for seed in range(4):
        plan, blocks = random_batch(200 + seed)
        case = random_case(plan, blocks, (6, 2, 64), torch.bfloat16, seed)
        together = dispatch.attend(*case, plan, 0.125)
        q, k, v, k_blocks, v_blocks = case
        for count in (1, 2, 3):
            dispatch.set_threads(count)
            assert torch.equal(dispatch.attend(*case, plan, 0.125), together)
            for row in range(0, plan.rows, max(1, plan.rows // 7)):
                alone = take_rows(plan, [row])
                one = slice(row, row + 1)
                out = dispatch.attend(q[one], k[one], v[one], k_blocks, v_blocks, alone, 0.125)
                assert torch.equal(out[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_it_does_not_matter_how_keys_are_spread_between_committed_pages_and_tree_slots(
    isa: str, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A line of 150 keys, of which the last 0 to 100 are a branch of a tree."""
    generator = torch.Generator().manual_seed(7)
    count, groups, dim = heads
    k, v = torch.randn(2, 150, groups, dim, generator=generator).unbind()
    q = torch.randn(150, count, dim, generator=generator)
    outputs = []
    for branch in (0, 1, 17, 64, 100):
        committed = 150 - branch
        plan, blocks = make_plan([Part(0, line=committed)], generator)
        k_blocks, v_blocks = random_blocks(blocks + 8, groups, dim, dtype, generator)
        first = slice(0, committed)
        out = dispatch.attend(q[first], k[first], v[first], k_blocks, v_blocks, plan, dim**-0.5)
        if branch:
            tree, _ = make_plan([Part(committed, tree=chain(branch))], generator)
            tree_blocks = blocks + torch.arange(tree.tree_block_tables.shape[1], dtype=torch.int32)[None]
            write = (
                tree_blocks.repeat_interleave(BLOCK_SIZE)[:branch].long() * BLOCK_SIZE
                + torch.arange(branch) % BLOCK_SIZE
            )
            tree = replace(tree, block_tables=plan.block_tables, tree_block_tables=tree_blocks, slot_mapping=write)
            rest = slice(committed, None)
            out = dispatch.attend(q[rest], k[rest], v[rest], k_blocks, v_blocks, tree, dim**-0.5)
        outputs.append(out[-1])
    for out in outputs[1:]:
        assert_near(out, outputs[0], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unseen_keys_cannot_poison_a_row(isa: str, dtype: torch.dtype) -> None:
    """Pages may hold what another session left there, infinities included."""
    generator = torch.Generator().manual_seed(5)
    plan, blocks = make_plan([Part(70, tree=random_tree(20, generator)), Part(5, line=3)], generator)
    case = random_case(plan, blocks, (4, 2, 32), dtype, 5)
    expected = dispatch.attend(*copied(case), plan, 0.2)
    q, k, v, k_blocks, v_blocks = case
    seen = torch.zeros(blocks * BLOCK_SIZE, dtype=torch.bool)
    for session, committed in ((0, 70), (1, 8)):
        index = torch.arange(committed)
        seen[plan.block_tables[session].long()[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE] = True
    seen[plan.slot_mapping] = True
    hostile = ~seen.view(blocks, BLOCK_SIZE)
    k_blocks.masked_fill_(hostile[:, None, None, :], float("nan"))
    v_blocks.masked_fill_(hostile[:, None, :, None], float("inf"))
    assert torch.equal(dispatch.attend(q, k, v, k_blocks, v_blocks, plan, 0.2), expected)
    twin = REFERENCE.attend(q, k, v, k_blocks, v_blocks, plan, 0.2)
    assert_near(twin, expected, dtype)


def test_a_row_that_sees_nothing_gets_zeros(isa: str) -> None:
    plan, blocks = make_plan([Part(0, line=1), Part(40, line=1)], torch.Generator().manual_seed(0))
    blind = replace(plan, context_lens=torch.zeros(2, dtype=torch.int32))
    case = random_case(plan, blocks, (2, 1, 32), torch.float32, 0)
    assert torch.equal(dispatch.attend(*case, blind, 0.2), torch.zeros(2, 2, 32))
    assert torch.equal(REFERENCE.attend(*case, blind, 0.2), torch.zeros(2, 2, 32))


def test_slots_move_before_the_batch_is_written(isa: str) -> None:
    """The tree slot a row is written to may be the one another token is just moved out of."""
    generator = torch.Generator().manual_seed(3)
    plan, blocks = make_plan([Part(10, tree=chain(3))], generator)
    committed = plan.block_tables[0, 0].long() * BLOCK_SIZE + torch.tensor([8, 9])
    plan = replace(plan, copy_from=plan.slot_mapping[:2], copy_to=committed)
    case = random_case(plan, blocks, (4, 2, 32), torch.bfloat16, 3)
    twin = copied(case)
    expected = REFERENCE.attend(*twin, plan, 0.2)
    assert_near(dispatch.attend(*case, plan, 0.2), expected, torch.bfloat16)
    assert torch.equal(case[3], twin[3])
    assert torch.equal(case[4], twin[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_commit_tree_slots_reads_all_before_it_writes(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    k_blocks, v_blocks = random_blocks(6, 3, 48, dtype, generator)
    order = torch.randperm(6 * BLOCK_SIZE, generator=generator)
    source = order[:40]
    target = torch.cat((source[1:], source[:1]))  # a cycle: each source is overwritten by another
    keys, values = k_blocks.permute(0, 3, 1, 2).reshape(-1, 3, 48), v_blocks.transpose(1, 2).reshape(-1, 3, 48)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[target], expected_values[target] = keys[source], values[source]
    dispatch.commit_tree_slots(k_blocks, v_blocks, source, target)
    assert torch.equal(k_blocks.permute(0, 3, 1, 2).reshape(-1, 3, 48), expected_keys)
    assert torch.equal(v_blocks.transpose(1, 2).reshape(-1, 3, 48), expected_values)
    dispatch.commit_tree_slots(k_blocks, v_blocks, source[:0], target[:0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_activation_dtypes_come_back_as_they_went_in(dtype: torch.dtype) -> None:
    plan, blocks = random_batch(7)
    case = random_case(plan, blocks, (4, 2, 64), dtype, 7)
    q, k, v, k_blocks, v_blocks = case
    out = dispatch.attend(q.to(dtype), k.to(dtype), v.to(dtype), k_blocks.clone(), v_blocks.clone(), plan, 0.125)
    assert out.dtype == dtype
    expected = REFERENCE.attend(*case, plan, 0.125)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
