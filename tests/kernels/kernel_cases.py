"""Random batches for the kernels: sessions with committed blocks and trees, packed into one plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.layer_weights import Attention, GatedMlp, LayerWeights

NONE = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Part:
    """One session's share of a batch: `line` rows appended to `committed` keys, or a tree given by its parents
    (-1: the committed end; parents come first), of which the first `old` slots were written by earlier batches."""

    committed: int
    line: int = 0
    tree: tuple[int, ...] = ()
    old: int = 0


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length - 1))


def star(length: int) -> tuple[int, ...]:
    return (-1,) * length


def random_tree(length: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(length))


def tree_mask(parents: tuple[int, ...], words: int) -> torch.Tensor:
    """`[slots, words]`: each slot sees itself and its ancestors."""
    bits = torch.zeros(len(parents), words * 64, dtype=torch.bool)
    for slot, parent in enumerate(parents):
        if parent >= 0:
            bits[slot] |= bits[parent]
        bits[slot, slot] = True
    weights = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)], dtype=torch.int64)
    return (bits.view(len(parents), words, 64).long() * weights).sum(-1)


def make_plan(parts: list[Part], generator: torch.Generator) -> tuple[AttentionMetadata, int]:
    """The plan of a batch and the number of blocks its cache needs; blocks are dealt out in random order."""
    needed = [(-(-(p.committed + p.line) // BLOCK_SIZE), -(-len(p.tree) // BLOCK_SIZE)) for p in parts]
    total = sum(a + b for a, b in needed) + 1
    deck = (torch.randperm(total - 1, generator=generator) + 1).tolist()  # block 0 belongs to nobody
    blocks = torch.zeros(len(parts), max(a for a, _ in needed), dtype=torch.int32)
    tree_blocks = torch.zeros(len(parts), max(b for _, b in needed), dtype=torch.int32)
    words = -(-max(len(p.tree) for p in parts) // 64)
    positions_of_slots = torch.zeros(len(parts), tree_blocks.shape[1] * BLOCK_SIZE, dtype=torch.int32)
    rows: list[tuple[int, int, int, int]] = []
    masks = []
    for s, (part, (dense, sparse)) in enumerate(zip(parts, needed, strict=True)):
        for column in range(dense):
            blocks[s, column] = deck.pop()
        for column in range(sparse):
            tree_blocks[s, column] = deck.pop()
        for i in range(part.committed, part.committed + part.line):
            rows.append((i, s, i + 1, int(blocks[s, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE))
            masks.append(torch.zeros(words, dtype=torch.int64))
        mask = tree_mask(part.tree, words) if part.tree else None
        for slot in range(len(part.tree)):
            assert mask is not None
            depth = sum(bin(int(w) & (1 << 64) - 1).count("1") for w in mask[slot])
            positions_of_slots[s, slot] = part.committed + depth - 1
            if slot < part.old:
                continue
            flat = int(tree_blocks[s, slot // BLOCK_SIZE]) * BLOCK_SIZE + slot % BLOCK_SIZE
            rows.append((part.committed + depth - 1, s, part.committed, flat))
            masks.append(mask[slot])
    positions, session, past, write = (torch.tensor(column) for column in zip(*rows, strict=True))
    plan = AttentionMetadata(
        positions, session.int(), past.int(), write, blocks, tree_blocks, torch.stack(masks), NONE, NONE,
        positions_of_slots,
    )  # fmt: skip
    return plan, total


def take_rows(plan: AttentionMetadata, rows: list[int]) -> AttentionMetadata:
    """The same batch with only some of its rows."""
    return AttentionMetadata(
        plan.positions[rows],
        plan.sequence_index[rows],
        plan.context_lens[rows],
        plan.slot_mapping[rows],
        plan.block_tables,
        plan.tree_block_tables,
        plan.tree_mask[rows],
        plan.copy_from,
        plan.copy_to,
        plan.tree_positions,
    )


def vary(layer: LayerWeights, **changes: Any) -> LayerWeights:
    """`layer` with other values of its fields, or of those of its attention and MLP."""

    def of(part: Any) -> dict[str, Any]:
        return {field.name: changes[field.name] for field in fields(part) if field.name in changes}

    layer = replace(layer, **of(LayerWeights))
    return replace(layer, attention=replace(layer.attention, **of(Attention)), mlp=replace(layer.mlp, **of(GatedMlp)))


def random_blocks(
    blocks: int, groups: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.randn(blocks, groups, dim, BLOCK_SIZE, generator=generator).to(dtype)
    v = torch.randn(blocks, groups, BLOCK_SIZE, dim, generator=generator).to(dtype)
    return k, v
