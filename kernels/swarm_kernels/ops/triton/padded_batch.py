"""A batch of fixed size that smaller batches are padded to, so that one CUDA graph serves them all.

Owns the sizes, the buffers and what padding looks like: a padded row sees nothing and is written nowhere, a padded copy
is skipped. Knows no graph; runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.triton.attention import AttentionShape, TileConfig, choose_tiling, kernel_metadata

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the batches that are worth a graph; wider_dtype ones keep the device busy by themselves."""

_COPIES = (0, 16, 64, 512)
_MIN_BLOCKS = 16
_SKIP = -1


@dataclass(frozen=True, slots=True)
class Size:
    """Everything a graph's launches depend on."""

    rows: int
    blocks: int  # columns of the block table
    words: int  # of a tree mask
    copies: int
    tiling: TileConfig

    @classmethod
    def of(cls, plan: AttentionMetadata, heads: AttentionShape, dtype: torch.dtype, processors: int) -> Size | None:
        """The size that holds `plan`, or None if it is too large for any."""
        rows = next((width for width in WIDTHS if width >= plan.rows), 0)
        copies = next((count for count in _COPIES if count >= plan.copy_from.shape[0]), -1)
        if not rows or not plan.rows or copies < 0:
            return None
        sessions, columns = plan.block_tables.shape
        words = plan.tree_mask.shape[1]
        blocks = max(_MIN_BLOCKS, int(triton.next_power_of_2(columns)))
        share = min(rows, int(triton.next_power_of_2(-(-plan.rows // max(1, sessions)))))  # rows of a session
        tiling = choose_tiling(rows, -(-rows // share), blocks * BLOCK_SIZE, heads, dtype, processors)
        return cls(rows, blocks, int(triton.next_power_of_2(words)) if words else 0, copies, tiling)


class PaddedBatch:
    """Buffers of one `Size`: `hidden [rows, width]`, `cos`, `sin` `[rows, rot]`, `plan`. Blank until loaded.

    The plan's tables have a line a row, for every row may be of another session. Entries that a batch does not set keep
    those of an earlier one, which name blocks of the same cache and are never looked at.
    """

    def __init__(self, size: Size, width: int, rot: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):  # buffers that may be written inside and outside of it
            self.size = size
            self.hidden = torch.zeros(size.rows, width, dtype=dtype, device=device)
            self.cos = torch.zeros(size.rows, rot, device=device)
            self.sin = torch.zeros(size.rows, rot, device=device)
            self.plan = _blank_plan(size, device)
        self._rows = 0  # that are not padding
        self._copies = 0

    @torch.no_grad()
    def load(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionMetadata) -> None:
        """Copy a batch in and make the rest padding. Nothing waits for the device."""
        rows, copies, mine, other = plan.rows, plan.copy_from.shape[0], self.plan, kernel_metadata(plan)
        self.hidden[:rows].copy_(hidden)
        self.cos[:rows].copy_(cos)
        self.sin[:rows].copy_(sin)
        for name in ("positions", "sequence_index", "context_lens", "slot_mapping"):
            getattr(mine, name)[:rows].copy_(getattr(other, name))
        _corner(mine.block_tables, other.block_tables)
        if self.size.words:
            words = other.tree_mask.shape[1]
            _corner(mine.tree_block_tables, other.tree_block_tables)
            mine.tree_mask[:rows, :words].copy_(other.tree_mask)
            mine.tree_mask[:rows, words:].zero_()
        if copies:
            mine.copy_from[:copies].copy_(other.copy_from)
            mine.copy_to[:copies].copy_(other.copy_to)
        self._pad(rows, copies)

    def _pad(self, rows: int, copies: int) -> None:
        """Blank what the batch before left beyond this one."""
        if rows < self._rows:
            stale = slice(rows, self._rows)
            self.plan.sequence_index[stale].zero_()
            self.plan.context_lens[stale].zero_()
            self.plan.tree_mask[stale].zero_()
            self.plan.slot_mapping[stale].fill_(_SKIP)
        if copies < self._copies:
            self.plan.copy_from[copies : self._copies].fill_(_SKIP)
        self._rows, self._copies = rows, copies


def _corner(table: torch.Tensor, smaller: torch.Tensor) -> None:
    lines, columns = min(smaller.shape[0], table.shape[0]), min(smaller.shape[1], table.shape[1])
    table[:lines, :columns].copy_(smaller[:lines, :columns])


def _blank_plan(size: Size, device: torch.device) -> AttentionMetadata:
    def filled(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return AttentionMetadata(
        positions=filled(0, torch.int64, size.rows),
        sequence_index=filled(0, torch.int32, size.rows),
        context_lens=filled(0, torch.int32, size.rows),
        slot_mapping=filled(_SKIP, torch.int64, size.rows),
        block_tables=filled(0, torch.int32, size.rows, size.blocks),
        tree_block_tables=filled(0, torch.int32, size.rows, size.words * (64 // BLOCK_SIZE)),
        tree_mask=filled(0, torch.int64, size.rows, size.words),
        copy_from=filled(_SKIP, torch.int64, size.copies),
        copy_to=filled(0, torch.int64, size.copies),
    )
