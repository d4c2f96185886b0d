"""The Triton kernels against the reference on random batches: on a GPU where there is one, else interpreted.

Triton decides when it is imported whether kernels are compiled or interpreted, so without a GPU these tests are run by
`test_triton_interpreter` in a process of their own. The interpreter takes milliseconds a program: batches are small.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernel_cases import NONE, Part, chain, make_plan, random_blocks, random_tree, star, take_rows

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.torch_reference import REFERENCE, append

pytest.importorskip("triton", reason="Triton is not installed")

from swarm_kernels.ops.triton import attention, selftest
from swarm_kernels.ops.triton.backend import TRITON

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED or not torch.cuda.is_available() else torch.device("cuda", 0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

pytestmark = pytest.mark.skipif(
    not INTERPRETED and DEVICE.type == "cpu", reason="test_triton_interpreter runs it in a process of its own"
)


@pytest.fixture(autouse=True)
def _few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same splits and tiles wherever the tests run."""
    monkeypatch.setattr(attention, "processors", lambda device: 8)


def random_batch(seed: int) -> tuple[AttentionMetadata, int]:
    """Up to three sessions, some twenty rows: prompts, trees with slots of earlier batches, decoding rows."""
    generator = torch.Generator().manual_seed(seed)

    def below(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    parts = []
    for _ in range(1 + below(3)):
        committed = (0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, below(60), 64, 500 + below(200))[below(7)]
        kind = below(5)
        if kind < 2:
            parts.append(Part(committed, line=1 + kind * below(6)))
        else:
            size = 1 + below(70 if kind == 4 else 8)
            tree = (chain(size), star(size), random_tree(size, generator))[kind - 2]
            parts.append(Part(committed, tree=tree, old=max(0, size - 1 - below(6))))
    return make_plan(parts, generator)


def random_case(
    plan: AttentionMetadata, blocks: int, heads: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    queries, groups, dim = heads
    q, k, v = (torch.randn(plan.rows, h, dim, generator=generator).to(dtype) for h in (queries, groups, groups))
    return (q, k, v, *random_blocks(blocks, groups, dim, dtype, generator))


def compare(
    case: Case,
    plan: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Run both; the blocks must end up the same and the rows within tolerance. -> the kernels' rows, on the CPU."""
    mine, twin = [x.to(DEVICE, copy=True) for x in case], [x.clone() for x in case]
    q, k, v, k_blocks, v_blocks = mine
    out = TRITON.attend(q, k, v, k_blocks, v_blocks, selftest.on_device(plan, DEVICE), scale, window, softcap).cpu()
    expected = REFERENCE.attend(twin[0], twin[1], twin[2], twin[3], twin[4], plan, scale, window, softcap)
    tolerance = TOLERANCE[case[0].dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(k_blocks.cpu(), twin[3])
    assert torch.equal(v_blocks.cpu(), twin[4])
    return out


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((3, 1, 32), torch.float32),
        ((4, 2, 80), torch.float32),
        ((2, 1, 256), torch.float32),
        ((3, 1, 64), torch.bfloat16),
        ((8, 1, 128), torch.float16),
        ((2, 2, 12), torch.float16),
    ],
    ids=str,
)
def test_attend_matches_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for seed in range(3):
        plan, blocks = random_batch(seed + 10 * heads[2])
        compare(random_case(plan, blocks, heads, dtype, seed), plan, heads[2] ** -0.5)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (130, None), (None, 5.0), (40, 5.0)])
def test_windows_and_caps_match_the_reference(window: int | None, softcap: float | None) -> None:
    for seed in (3, 5):
        plan, blocks = random_batch(100 + seed)
        compare(random_case(plan, blocks, (2, 1, 32), torch.float32, seed), plan, 0.5, window, softcap)


def test_queries_wider_than_the_cache() -> None:
    plan, blocks = random_batch(7)
    q, k, v, k_blocks, v_blocks = random_case(plan, blocks, (2, 1, 32), torch.float32, 7)
    half = torch.float16  # which, unlike bf16, the interpreter rounds as a GPU does
    compare((q, k, v, k_blocks.to(half), v_blocks.to(half)), plan, 0.2)


def test_long_contexts_are_split_and_merged() -> None:
    plan, blocks = make_plan([Part(1100, line=1), Part(700, tree=star(2))], torch.Generator().manual_seed(1))
    assert attention.tiling_of(plan, attention.AttentionShape(2, 1, 32), torch.float32).splits == 4
    compare(random_case(plan, blocks, (2, 1, 32), torch.float32, 1), plan, 0.2)


def test_sessions_whose_rows_lie_apart() -> None:
    """More tiles than are launched: programs take several."""
    generator = torch.Generator().manual_seed(2)
    plan, blocks = make_plan([Part(20, line=6), Part(3, line=6)], generator)
    apart = take_rows(plan, [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11])
    assert attention.tiling_of(apart, attention.AttentionShape(2, 1, 32), torch.float32).tiles < 12
    compare(random_case(apart, blocks, (2, 1, 32), torch.float32, 2), apart, 0.2)


def test_a_row_does_not_depend_on_its_company_or_on_where_its_keys_lie() -> None:
    """A chain of tree slots is the same text as committed tokens."""
    generator = torch.Generator().manual_seed(3)
    heads, scale = (2, 1, 32), 0.2
    line, line_blocks = make_plan([Part(40, line=6)], generator)
    tree, tree_blocks = make_plan([Part(40, tree=chain(6))], generator)
    q, k, v, k_blocks, v_blocks = random_case(line, line_blocks, heads, torch.float32, 3)
    together = compare((q, k, v, k_blocks, v_blocks), line, scale)
    k_other, v_other = random_blocks(tree_blocks, 1, 32, torch.float32, generator)
    for here, there in zip(line.block_tables[0, :3].tolist(), tree.block_tables[0].tolist(), strict=True):
        k_other[there], v_other[there] = k_blocks[here], v_blocks[here]
    torch.testing.assert_close(compare((q, k, v, k_other, v_other), tree, scale), together, rtol=1e-5, atol=1e-5)
    append(k, v, k_blocks, v_blocks, line.slot_mapping)
    alone = compare((q[3:4], k[3:4], v[3:4], k_blocks, v_blocks), take_rows(line, [3]), scale)
    torch.testing.assert_close(alone[0], together[3], rtol=1e-5, atol=1e-5)


def test_unseen_keys_cannot_poison_a_row() -> None:
    """Pages may hold what another session left there, infinities included."""
    generator = torch.Generator().manual_seed(5)
    plan, blocks = make_plan([Part(37, tree=random_tree(9, generator)), Part(5, line=3)], generator)
    q, k, v, k_blocks, v_blocks = random_case(plan, blocks, (2, 1, 32), torch.float32, 5)
    seen = torch.zeros(blocks * BLOCK_SIZE, dtype=torch.bool)
    for session, committed in ((0, 37), (1, 8)):
        index = torch.arange(committed)
        seen[plan.block_tables[session].long()[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE] = True
    seen[plan.slot_mapping] = True
    hostile = ~seen.view(blocks, BLOCK_SIZE)
    k_blocks.masked_fill_(hostile[:, None, None, :], float("nan"))
    v_blocks.masked_fill_(hostile[:, None, :, None], float("inf"))
    mine = [x.to(DEVICE, copy=True) for x in (q, k, v, k_blocks, v_blocks)]
    out = TRITON.attend(*mine, selftest.on_device(plan, DEVICE), 0.2).cpu()
    expected = REFERENCE.attend(q, k, v, k_blocks, v_blocks, plan, 0.2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_gets_zeros() -> None:
    plan, blocks = make_plan([Part(0, line=1), Part(40, line=1)], torch.Generator().manual_seed(0))
    blind = replace(plan, context_lens=torch.zeros(2, dtype=torch.int32))
    out = compare(random_case(blind, blocks, (2, 1, 32), torch.float32, 0), blind, 0.2)
    assert torch.equal(out, torch.zeros(2, 2, 32))


def test_slots_move_before_the_batch_is_written() -> None:
    """The tree slot a row is written to may be the one another token is just moved out of."""
    plan, blocks = make_plan([Part(10, tree=chain(3))], torch.Generator().manual_seed(3))
    committed = plan.block_tables[0, 0].long() * BLOCK_SIZE + torch.tensor([8, 9])
    plan = replace(plan, copy_from=plan.slot_mapping[:2], copy_to=committed)
    compare(random_case(plan, blocks, (2, 1, 32), torch.float16, 3), plan, 0.2)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 48), (torch.bfloat16, 256)], ids=str)
def test_commit_tree_slots_reads_all_before_it_writes(dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = [x.to(DEVICE) for x in random_blocks(6, 3, dim, dtype, generator)]
    twins = [x.clone() for x in blocks]
    order = torch.randperm(6 * BLOCK_SIZE, generator=generator).to(DEVICE)
    source = order[:40]
    target = torch.cat((source[1:], source[:1]))  # a cycle: each source is overwritten by another
    attention.commit_tree_slots(blocks[0], blocks[1], source, target)
    REFERENCE.commit_tree_slots(twins[0], twins[1], source, target)
    assert torch.equal(blocks[0], twins[0])
    assert torch.equal(blocks[1], twins[1])
    skipped = torch.full((3,), -1, device=DEVICE)
    attention.commit_tree_slots(blocks[0], blocks[1], skipped, target[:3])
    attention.commit_tree_slots(blocks[0], blocks[1], NONE.to(DEVICE), NONE.to(DEVICE))
    assert torch.equal(blocks[0], twins[0])


def test_tilings_are_sound() -> None:
    heads = attention.AttentionShape(32, 8, 128)
    for rows in (1, 3, 16, 64, 700):
        for sessions in {1, min(rows, 4), rows}:
            for context in (0, 16, 4096, 131072):
                tiling = attention.choose_tiling(rows, sessions, context, heads, torch.bfloat16, 132)
                assert tiling.tile * heads.queries_per_kv <= tiling.block_m <= 64
                assert 1 <= tiling.tiles <= rows
                assert tiling.splits & (tiling.splits - 1) == 0
    assert attention.choose_tiling(1, 1, 131072, heads, torch.bfloat16, 132).splits == 32
    assert 64 % attention.block_n(attention.AttentionShape(1, 1, 256), torch.float32) == 0
    assert not attention.supports(attention.AttentionShape(1, 1, 512), torch.bfloat16)
    assert not attention.supports(attention.AttentionShape(71, 1, 64), torch.bfloat16)
    assert not attention.supports(heads, torch.float64)
