"""Fixed-size batches that smaller batches are padded to, so that one CUDA graph serves them all.

Owns the sizes, the buffers and the padding: a padding row has no visible keys and no slot, a padding copy is skipped.
Knows no graph; runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.triton.attention import AttentionShape, TileConfig, choose_tiling, kernel_metadata

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes with a CUDA graph; larger batches keep the device busy despite launch overhead."""

_COPY_SIZES = (0, 16, 64, 512)
_MIN_BLOCKS = 16  # columns of the block table: one graph for all short contexts
_SKIP = -1  # slot of padding


@dataclass(frozen=True, slots=True)
class Size:
    """Everything that a graph's launches depend on."""

    rows: int
    blocks: int  # columns of the block table
    words: int  # of a tree mask
    copies: int
    tiling: TileConfig

    @classmethod
    def of(cls, plan: AttentionMetadata, heads: AttentionShape, dtype: torch.dtype, processors: int) -> Size | None:
        """The size that holds `plan`, or None if it is too large for any."""
        rows = next((width for width in WIDTHS if width >= plan.rows), 0)
        copies = next((count for count in _COPY_SIZES if count >= plan.copy_from.shape[0]), -1)
        if not rows or not plan.rows or copies < 0:
            return None
        sequences, columns = plan.block_tables.shape
        words = plan.tree_mask.shape[1]
        blocks = max(_MIN_BLOCKS, int(triton.next_power_of_2(columns)))
        rows_per_sequence = min(rows, int(triton.next_power_of_2(-(-plan.rows // max(1, sequences)))))
        tiling = choose_tiling(rows, -(-rows // rows_per_sequence), blocks * BLOCK_SIZE, heads, dtype, processors)
        return cls(rows, blocks, int(triton.next_power_of_2(words)) if words else 0, copies, tiling)


class PaddedBatch:
    """Buffers of one `Size`: `hidden [rows, width]`, `cos`, `sin` `[rows, rot]`, `plan`. All padding until loaded.
    With several rotary tables, these are `[tables, rows, rot]`.

    The plan's block tables have a line per row, since every row may belong to a different sequence. Entries that a
    batch does not set keep the values of an earlier batch: they are valid blocks of the same cache, and masked.
    """

    def __init__(
        self, size: Size, width: int, rot: int, dtype: torch.dtype, device: torch.device, tables: tuple[int, ...] = ()
    ) -> None:
        """`tables`: their number, where `cos` and `sin` have a dimension for it."""
        with torch.inference_mode(False):  # buffers that may be written inside and outside of it
            self.size = size
            self.hidden = torch.zeros(size.rows, width, dtype=dtype, device=device)
            self.cos = torch.zeros(*tables, size.rows, rot, device=device)
            self.sin = torch.zeros(*tables, size.rows, rot, device=device)
            self.plan = _blank_plan(size, device)
        self._rows = 0  # not padding
        self._copies = 0

    @torch.no_grad()
    def load(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionMetadata) -> None:
        """Copy a batch in and make the rest padding. Does not synchronize with the device."""
        rows, copies, ours, source = plan.rows, plan.copy_from.shape[0], self.plan, kernel_metadata(plan)
        self.hidden[:rows].copy_(hidden)
        self.cos[..., :rows, :].copy_(cos)
        self.sin[..., :rows, :].copy_(sin)
        for name in ("positions", "sequence_index", "context_lens", "slot_mapping"):
            getattr(ours, name)[:rows].copy_(getattr(source, name))
        _corner(ours.block_tables, source.block_tables)
        if self.size.words:
            words = source.tree_mask.shape[1]
            _corner(ours.tree_block_tables, source.tree_block_tables)
            _corner(ours.tree_positions, source.tree_positions)
            ours.tree_mask[:rows, :words].copy_(source.tree_mask)
            ours.tree_mask[:rows, words:].zero_()
        if copies:
            ours.copy_from[:copies].copy_(source.copy_from)
            ours.copy_to[:copies].copy_(source.copy_to)
        self._pad(rows, copies)

    def _pad(self, rows: int, copies: int) -> None:
        """Reset the rows and copies that only the previous batch used."""
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
        tree_positions=filled(0, torch.int32, size.rows, size.words * 64),
    )
