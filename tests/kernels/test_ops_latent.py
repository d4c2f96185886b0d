"""Attention whose values are the first numbers of its keys, against the plain-torch reference and against plain
attention on copies of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Part, chain, make_plan, random_tree, star, take_rows
from test_ops_attend import assert_near, random_batch

from swarm.errors import KernelError
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.torch_reference import REFERENCE, packed_bits, unpacked_bits

pytestmark = pytest.mark.slow

# Query heads, KV heads, sizes of a key, of the value in it, and of what is stored beside it. A single row of 128 heads
# is more than a tile of rows usually is; 576 and 512 are DeepSeek-V3's sizes.
SHAPES = ((16, 1, 576, 512, 0), (3, 1, 48, 32, 16), (128, 1, 64, 16, 0), (4, 2, 80, 80, 32), (1, 1, 32, 16, 0))
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def latent_case(
    plan: AttentionMetadata, blocks: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    heads, groups, dim, _, stored = shape
    q, k, v = (
        torch.randn(plan.rows, h, d, generator=generator) for h, d in ((heads, dim), (groups, dim), (groups, stored))
    )
    k_blocks = torch.randn(blocks, groups, dim, BLOCK_SIZE, generator=generator).to(dtype)
    return q, k, v, k_blocks, torch.randn(blocks, groups, BLOCK_SIZE, stored, generator=generator).to(dtype)


def copied(case: Case) -> Case:
    q, k, v, k_blocks, v_blocks = case
    return q, k, v, k_blocks.clone(), v_blocks.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_matches_the_reference(isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]) -> None:
    for seed in range(5):
        plan, blocks = random_batch(seed)
        case = latent_case(plan, blocks, shape, dtype, seed)
        twin = copied(case)
        out = dispatch.attend_latent(*case, plan, shape[2] ** -0.5, shape[3])
        expected = REFERENCE.attend_latent(*twin, plan, shape[2] ** -0.5, shape[3])
        assert out.shape == (plan.rows, shape[0], shape[3])
        assert_near(out, expected, dtype)
        assert torch.equal(case[3], twin[3])
        assert torch.equal(case[4], twin[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_attention_with_values_that_repeat_the_keys(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit: the panels of values are the same, wherever they come from."""
    plan, blocks = random_batch(3)
    q, k, v, k_blocks, v_blocks = latent_case(plan, blocks, (12, 1, 96, 64, 0), dtype, 3)
    padded = torch.cat((k[..., :64], torch.zeros_like(k[..., 64:])), -1)
    repeated = torch.cat((k_blocks[:, :, :64].transpose(2, 3), torch.zeros(blocks, 1, BLOCK_SIZE, 32).to(dtype)), -1)
    plain = dispatch.attend(q, k, padded, k_blocks.clone(), repeated.contiguous(), plan, 0.1)
    latent = dispatch.attend_latent(q, k, v, k_blocks, v_blocks, plan, 0.1, 64)
    assert torch.equal(latent, plain[..., :64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chooses", [False, True])
def test_long_contexts_match_the_reference(isa: str, dtype: torch.dtype, softcap: float | None, chooses: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    parts = [Part(2300, tree=random_tree(70, generator)), Part(1024, line=33), Part(128, tree=star(3))]
    plan, blocks = make_plan(parts, generator)
    case = latent_case(plan, blocks, (16, 1, 80, 64, 0), dtype, 11)
    chosen = packed_bits(torch.rand(plan.rows, 2304, generator=generator) < 0.1) if chooses else None
    if chosen is not None:
        chosen[:, 8:14] = 0  # a run of keys that nobody chooses
    expected = REFERENCE.attend_latent(*copied(case), plan, 0.125, 64, softcap, chosen)
    assert_near(dispatch.attend_latent(*case, plan, 0.125, 64, softcap, chosen), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_that_are_not_chosen_count_for_nothing(isa: str, dtype: torch.dtype) -> None:
    """As if the context were without them."""
    plan, blocks = make_plan([Part(100, line=1)], torch.Generator().manual_seed(9))
    q, k, v, k_blocks, v_blocks = latent_case(plan, blocks, (6, 1, 48, 32, 0), dtype, 9)
    mask = torch.zeros(1, 128, dtype=torch.bool)
    mask[0, torch.tensor([3, 17, 64, 99, 100])] = True
    chosen = packed_bits(mask)
    assert torch.equal(unpacked_bits(chosen, 128), mask)
    out = dispatch.attend_latent(q, k, v, k_blocks, v_blocks, plan, 0.2, 32, None, chosen)
    slots = k_blocks.permute(0, 3, 1, 2)[plan.block_tables[0].long()].reshape(-1, 48)[:101][mask[0, :101]]
    scores = (q[0] * 0.2) @ slots.float().T
    expected = scores.softmax(-1) @ slots[:, :32].float()
    torch.testing.assert_close(out[0], expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(KernelError, match="choose no keys"):
        dispatch.attend_latent(q, k, v, k_blocks, v_blocks, plan, 0.2, 32, None, chosen[:, :1])


def test_a_row_alone_is_the_row_among_others(isa: str) -> None:
    """Bit for bit, on one thread and on several."""
    for seed in range(3):
        plan, blocks = random_batch(200 + seed)
        case = latent_case(plan, blocks, (8, 1, 144, 128, 0), torch.bfloat16, seed)
        together = dispatch.attend_latent(*case, plan, 0.125, 128)
        q, k, v, k_blocks, v_blocks = case
        for count in (1, 2, 3):
            dispatch.set_threads(count)
            assert torch.equal(dispatch.attend_latent(*case, plan, 0.125, 128), together)
            for row in range(0, plan.rows, max(1, plan.rows // 5)):
                one = slice(row, row + 1)
                out = dispatch.attend_latent(
                    q[one], k[one], v[one], k_blocks, v_blocks, take_rows(plan, [row]), 0.125, 128
                )
                assert torch.equal(out[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unseen_keys_cannot_poison_a_row(isa: str, dtype: torch.dtype) -> None:
    """Blocks may hold what another session left there, infinities included."""
    generator = torch.Generator().manual_seed(5)
    plan, blocks = make_plan([Part(70, tree=random_tree(20, generator)), Part(5, line=3)], generator)
    case = latent_case(plan, blocks, (4, 1, 48, 32, 0), dtype, 5)
    expected = dispatch.attend_latent(*copied(case), plan, 0.2, 32)
    seen = torch.zeros(blocks * BLOCK_SIZE, dtype=torch.bool)
    for session, committed in ((0, 70), (1, 8)):
        index = torch.arange(committed)
        seen[plan.block_tables[session].long()[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE] = True
    seen[plan.slot_mapping] = True
    for poison in (float("nan"), float("inf")):
        case[3].masked_fill_(~seen.view(blocks, BLOCK_SIZE)[:, None, None, :], poison)
        assert torch.equal(dispatch.attend_latent(*case, plan, 0.2, 32), expected)
        assert_near(REFERENCE.attend_latent(*case, plan, 0.2, 32), expected, dtype)


@pytest.mark.parametrize("stored", [0, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_commit_tree_slots_reads_all_before_it_writes(isa: str, dtype: torch.dtype, stored: int) -> None:
    generator = torch.Generator().manual_seed(4)
    k_blocks = torch.randn(6, 1, 80, BLOCK_SIZE, generator=generator).to(dtype)
    v_blocks = torch.randn(6, 1, BLOCK_SIZE, stored, generator=generator).to(dtype)
    order = torch.randperm(6 * BLOCK_SIZE, generator=generator)
    source = order[:40]
    target = torch.cat((source[1:], source[:1]))  # a cycle: each source is overwritten by another

    def slots() -> tuple[torch.Tensor, torch.Tensor]:
        return k_blocks.permute(0, 3, 1, 2).reshape(-1, 80).clone(), v_blocks.reshape(6 * BLOCK_SIZE, stored).clone()

    keys, values = slots()
    keys[target], values[target] = keys[source], values[source]
    dispatch.commit_tree_slots(k_blocks, v_blocks, source, target)
    assert all(torch.equal(a, b) for a, b in zip(slots(), (keys, values), strict=True))


def test_slots_move_before_the_batch_is_written(isa: str) -> None:
    """The tree slot a row is written to may be the one another token is just moved out of."""
    plan, blocks = make_plan([Part(10, tree=chain(3))], torch.Generator().manual_seed(3))
    committed = plan.block_tables[0, 0].long() * BLOCK_SIZE + torch.tensor([8, 9])
    plan = replace(plan, copy_from=plan.slot_mapping[:2], copy_to=committed)
    case = latent_case(plan, blocks, (4, 1, 48, 32, 16), torch.bfloat16, 3)
    twin = copied(case)
    expected = REFERENCE.attend_latent(*twin, plan, 0.2, 32)
    assert_near(dispatch.attend_latent(*case, plan, 0.2, 32), expected, torch.bfloat16)
    assert torch.equal(case[3], twin[3])
    assert torch.equal(case[4], twin[4])


@pytest.mark.parametrize("change", ["no value", "value larger than a key", "values", "queries", "slot"])
def test_what_does_not_fit_is_refused(isa: str, change: str) -> None:
    plan, blocks = make_plan([Part(20, line=2)], torch.Generator().manual_seed(0))
    q, k, v, k_blocks, v_blocks = latent_case(plan, blocks, (4, 1, 48, 32, 0), torch.float32, 0)
    value_dim = {"no value": 0, "value larger than a key": 64}.get(change, 32)
    if change == "values":
        v = torch.zeros(plan.rows, 1, 32)
    if change == "queries":
        q = q[..., :32]
    if change == "slot":
        plan = replace(plan, slot_mapping=plan.slot_mapping + blocks * BLOCK_SIZE)
    with pytest.raises(KernelError):
        dispatch.attend_latent(q, k, v, k_blocks, v_blocks, plan, 0.1, value_dim)
