"""A batch of packed rows from many sessions, and where each row's keys and values live.

`kv_cache` makes a AttentionMetadata, `attention` and `span` consume it. Knows no model and no peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE = 16
"""Tokens in one KV page. Keys are stored `[pages, kv_heads, head_dim, PAGE]` (transposed: the scores of a page's tokens
are computed side by side), values `[pages, kv_heads, PAGE, head_dim]`; one pair of tensors a layer."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """`n` rows of `S` sessions. Flat slot = page * PAGE + offset within the page.

    Row i sees the first `past[i]` committed keys of its session (its own included if it is a line row, since rows are
    written before anyone reads) and those of its session's tree slots whose bit is set in `tree_mask[i]` (itself
    included if it is a tree row).
    """

    positions: torch.Tensor  # [n] int64, rotary positions
    sequence_index: torch.Tensor  # [n] int32, row's index into the page tables
    context_lens: torch.Tensor  # [n] int32
    slot_mapping: torch.Tensor  # [n] int64, flat slot the row's key and value go to
    block_tables: torch.Tensor  # [S, max_pages] int32, committed pages in order, padded with 0
    tree_block_tables: torch.Tensor  # [S, max_tree_pages] int32, padded with 0
    tree_mask: torch.Tensor  # [n, words] int64; bit j of word w is tree slot 64 * w + j; words may be 0
    copy_from: torch.Tensor  # [m] int64 flat slots: before the batch, in every layer, the tree slots just committed ...
    copy_to: torch.Tensor  # [m] int64 ... are moved into the committed pages

    @property
    def rows(self) -> int:
        return self.positions.shape[0]
