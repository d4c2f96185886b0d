"""Builds the AttentionMetadata of a batch from the rows of its sessions. Owns the layout; changes no session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.device.transfer import upload
from swarm_kernels.kvcache.sequence import SequenceBlocks


class MetadataBuilder:
    """Collects the rows of a batch in numpy arrays, which become tensors without a copy."""

    __slots__ = (
        "context_lens", "copy_from", "copy_to", "masks", "positions", "row", "rows", "sequence_index", "slot_mapping",
        "top",
    )  # fmt: skip

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.row = 0
        self.top = 0
        self.positions = np.empty(rows, np.int64)
        self.slot_mapping = np.empty(rows, np.int64)
        self.context_lens = np.empty(rows, np.int32)
        self.sequence_index = np.zeros(rows, np.int32)
        self.masks: list[tuple[int, int]] = []  # (row, mask)
        self.copy_from: list[int] = []
        self.copy_to: list[int] = []

    def copy_block(self, old: int, new: int, tokens: int) -> None:
        self.copy_from.extend(range(old * BLOCK_SIZE, old * BLOCK_SIZE + tokens))
        self.copy_to.extend(range(new * BLOCK_SIZE, new * BLOCK_SIZE + tokens))

    def add_causal(self, index: int, sequence: SequenceBlocks, start: int, rows: int) -> None:
        row = self.row
        if rows == 1:
            self.positions[row] = start
            self.slot_mapping[row] = sequence.address(start)
            self.context_lens[row] = start + 1
            self.sequence_index[row] = index
        elif rows:
            part = slice(row, row + rows)
            positions = np.arange(start, start + rows, dtype=np.int64)
            self.positions[part] = positions
            self.slot_mapping[part] = (
                sequence.table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            )
            self.context_lens[part] = positions + 1
            self.sequence_index[part] = index
        self.row += rows
        self.top = max(self.top, start + rows - 1)

    def add_tree(self, index: int, sequence: SequenceBlocks, slots: Sequence[int]) -> None:
        row = self.row
        for slot in slots:
            node = sequence.tree[slot]
            self.positions[row] = node.position
            self.slot_mapping[row] = sequence.slot_address(slot)
            self.masks.append((row, node.mask))
            self.top = max(self.top, node.position)
            row += 1
        self.context_lens[self.row : row] = sequence.length
        self.sequence_index[self.row : row] = index
        self.row = row

    def finish(self, sessions: Sequence[SequenceBlocks], device: torch.device) -> AttentionMetadata:
        tree_sessions = sessions if self.masks else ()
        words = max((sequence.tree_words() for sequence in tree_sessions), default=0)
        tree_mask = np.zeros((self.rows, words), np.int64)
        for row, mask in self.masks:
            tree_mask[row] = np.frombuffer(mask.to_bytes(words * 8, "little"), np.int64)
        tree_tables = _table([sequence.tree_table[: words * (64 // BLOCK_SIZE)] for sequence in sessions])
        tree_positions = np.zeros((len(tree_tables), tree_tables.shape[1] * BLOCK_SIZE), np.int32)
        for index, sequence in enumerate(tree_sessions):
            for slot, node in sequence.tree.items():
                tree_positions[index, slot] = node.position
        tensors = (
            self.positions,
            self.sequence_index,
            self.context_lens,
            self.slot_mapping,
            _table([sequence.table[: sequence.count] for sequence in sessions]),
            tree_tables,
            tree_mask,
            np.array(self.copy_from, np.int64),
            np.array(self.copy_to, np.int64),
            tree_positions,
        )
        return AttentionMetadata(*upload(tensors, device))


def _table(rows: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """`[S, longest row]`, padded with 0. A single row is not copied."""
    if len(rows) == 1:
        return rows[0][None]
    table = np.zeros((len(rows), max((len(row) for row in rows), default=0)), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
