"""What does not fit together is refused before any kernel runs, by both implementations alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from kernel_cases import Part, make_plan, random_blocks, vary

from swarm.errors import KernelError
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.torch_reference import REFERENCE

HEADS, GROUPS, DIM = 4, 2, 32
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["best", "reference"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    dispatch.select_isa(request.param)
    yield
    dispatch.select_isa("best")


def good_plan() -> tuple[AttentionMetadata, int]:
    return make_plan([Part(20, line=2), Part(5, tree=(-1, 0, 0))], torch.Generator().manual_seed(0))


def good_tensors(plan: AttentionMetadata, blocks: int) -> Tensors:
    k_blocks, v_blocks = random_blocks(blocks, GROUPS, DIM, torch.float32, torch.Generator().manual_seed(0))
    rows = plan.rows
    return {
        "q": torch.randn(rows, HEADS, DIM),
        "k": torch.randn(rows, GROUPS, DIM),
        "v": torch.randn(rows, GROUPS, DIM),
        "k_blocks": k_blocks,
        "v_blocks": v_blocks,
    }


def changed(tensor: torch.Tensor, value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


SLOTS = torch.zeros(1, dtype=torch.int64)
BAD_PLANS: dict[str, Callable[[AttentionMetadata, int], AttentionMetadata]] = {
    "session": lambda p, n: replace(p, sequence_index=changed(p.sequence_index, 2)),
    "negative session": lambda p, n: replace(p, sequence_index=changed(p.sequence_index, -1)),
    "past": lambda p, n: replace(p, context_lens=changed(p.context_lens, p.block_tables.shape[1] * BLOCK_SIZE + 1)),
    "write": lambda p, n: replace(p, slot_mapping=changed(p.slot_mapping, n * BLOCK_SIZE)),
    "negative write": lambda p, n: replace(p, slot_mapping=changed(p.slot_mapping, -1)),
    "block": lambda p, n: replace(p, block_tables=changed(p.block_tables, n)),
    "tree block": lambda p, n: replace(p, tree_block_tables=changed(p.tree_block_tables, n)),
    "tree mask": lambda p, n: replace(p, tree_mask=changed(p.tree_mask, 1 << 16)),
    "sign bit of the mask": lambda p, n: replace(p, tree_mask=changed(p.tree_mask, -(1 << 63))),
    "copy from": lambda p, n: replace(p, copy_from=SLOTS + n * BLOCK_SIZE, copy_to=SLOTS),
    "copy to": lambda p, n: replace(p, copy_from=SLOTS, copy_to=SLOTS - 1),
    "rows": lambda p, n: replace(p, context_lens=p.context_lens[1:]),
    "tables": lambda p, n: replace(p, block_tables=p.block_tables[:1]),
    "copies": lambda p, n: replace(p, copy_from=SLOTS),
    "positions of slots": lambda p, n: replace(p, tree_positions=p.tree_positions[:, 1:]),
}


@pytest.mark.parametrize("fault", BAD_PLANS)
def test_a_plan_beyond_its_cache_is_refused(implementation: None, fault: str) -> None:
    plan, blocks = good_plan()
    tensors = good_tensors(plan, blocks)
    before = tensors["k_blocks"].clone()
    with pytest.raises(KernelError):
        dispatch.attend(**tensors, plan=BAD_PLANS[fault](plan, blocks), scale=1.0)
    assert torch.equal(tensors["k_blocks"], before)
    dispatch.attend(**tensors, plan=plan, scale=1.0)


BAD_TENSORS: dict[str, Callable[[Tensors], Tensors]] = {
    "query heads": lambda t: {"q": t["q"][:, :3]},
    "query size": lambda t: {"q": t["q"][..., :16]},
    "query rows": lambda t: {"q": t["q"][1:]},
    "keys": lambda t: {"k": t["k"][:, :1]},
    "values": lambda t: {"v": t["v"][1:]},
    "block size": lambda t: {"k_blocks": t["k_blocks"][..., :8]},
    "no head size": lambda t: {
        name: t[name][..., :0] if name != "k_blocks" else t[name][:, :, :0]
        for name in ("q", "k", "v", "k_blocks", "v_blocks")
    },
    "value blocks": lambda t: {"v_blocks": t["v_blocks"][1:]},
    "mixed dtypes": lambda t: {"v_blocks": t["v_blocks"].bfloat16()},
    "strides": lambda t: {"v_blocks": t["v_blocks"].transpose(2, 3).contiguous().transpose(2, 3)},
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(implementation: None, fault: str) -> None:
    plan, blocks = good_plan()
    tensors = good_tensors(plan, blocks)
    with pytest.raises(KernelError):
        dispatch.attend(**(tensors | BAD_TENSORS[fault](tensors)), plan=plan, scale=1.0)


@pytest.mark.parametrize("dim", [1, 24, 1040])
def test_head_sizes_without_a_compiled_kernel_take_plain_torch(dim: int) -> None:
    plan, blocks = good_plan()
    generator = torch.Generator().manual_seed(1)
    k_blocks, v_blocks = random_blocks(blocks, GROUPS, dim, torch.float32, generator)
    rows = [torch.randn(plan.rows, heads, dim, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
    twins = (k_blocks.clone(), v_blocks.clone())
    expected = REFERENCE.attend(*rows, *twins, plan, dim**-0.5)
    assert torch.equal(dispatch.attend(*rows, k_blocks, v_blocks, plan, dim**-0.5), expected)


@pytest.mark.parametrize(
    ("source", "target"), [((0, 1), (2,)), ((-1,), (0,)), ((0,), (64,))], ids=["count", "below", "beyond"]
)
def test_slots_beyond_the_cache_are_not_copied(
    implementation: None, source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    k_blocks, v_blocks = torch.zeros(4, 1, 16, BLOCK_SIZE), torch.zeros(4, 1, BLOCK_SIZE, 16)
    with pytest.raises(KernelError):
        dispatch.commit_tree_slots(k_blocks, v_blocks, torch.tensor(source), torch.tensor(target))


def small_layer() -> dispatch.LayerWeights:
    def linear(outputs: int, inputs: int) -> dispatch.Linear:
        return dispatch.pack_linear(torch.randn(outputs, inputs))

    attention = dispatch.Attention(
        qkv=linear((HEADS + 2 * GROUPS) * DIM, 48),
        o=linear(48, HEADS * DIM),
        heads=HEADS,
        kv_heads=GROUPS,
        head_dim=DIM,
        scale=1.0,
    )
    mlp = dispatch.GatedMlp(linear(64, 48), linear(48, 32))
    return dispatch.LayerWeights(attention, mlp, attn_norm=torch.ones(48), mlp_norm=torch.ones(48), eps=1e-5)


def test_a_layer_refuses_what_does_not_fit(implementation: None) -> None:
    plan, blocks = good_plan()
    tensors = good_tensors(plan, blocks)
    layer = small_layer()
    hidden, turn = torch.randn(plan.rows, 48), torch.zeros(plan.rows, DIM)
    cache = (tensors["k_blocks"], tensors["v_blocks"])
    dispatch.decoder_layer(hidden, layer, turn, turn, *cache, plan)
    other = random_blocks(blocks, GROUPS, 16, torch.float32, torch.Generator())
    for bad in (
        (hidden[1:], turn, turn, *cache, plan),
        (hidden[:, 1:], turn, turn, *cache, plan),
        (hidden, turn[1:], turn[1:], *cache, plan),
        (hidden, torch.zeros(plan.rows, 2 * DIM), torch.zeros(plan.rows, 2 * DIM), *cache, plan),
        (hidden, turn, turn, *other, plan),
        (hidden, turn, turn, *cache, BAD_PLANS["write"](plan, blocks)),
    ):
        with pytest.raises(KernelError):
            dispatch.decoder_layer(bad[0], layer, *bad[1:])


def test_weights_that_do_not_fit_each_other_are_refused() -> None:
    plan, blocks = good_plan()
    tensors = good_tensors(plan, blocks)
    hidden, turn = torch.randn(plan.rows, 48), torch.zeros(plan.rows, DIM)
    for change in (
        {"qkv": dispatch.pack_linear(torch.zeros(16, 48))},
        {"down": dispatch.pack_linear(torch.zeros(32, 32))},
        {"attn_norm": torch.ones(47)},
        {"mlp_post_norm": torch.ones(47)},
        {"q_norm": torch.ones(16)},
        {"q_norm": torch.ones(HEADS * DIM), "k_norm": torch.ones(DIM)},
        {"sinks": torch.ones(HEADS - 1)},
        {"window": 0},
        {"window": 4, "chunk": 4},
        {"rope": 1},
    ):
        with pytest.raises(KernelError):
            dispatch.decoder_layer(
                hidden, vary(small_layer(), **change), turn, turn, tensors["k_blocks"], tensors["v_blocks"], plan
            )
