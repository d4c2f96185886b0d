"""A batch of packed rows from many sessions, and where each row's keys and values live.

`kvcache.cache` makes an AttentionMetadata; `ops` and `runtime` consume it. No model and no network code here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE = 16
"""Tokens in one KV block. Keys are stored `[blocks, kv_heads, head_dim, BLOCK_SIZE]` (transposed: the scores of a
block's tokens are computed side by side), values `[blocks, kv_heads, BLOCK_SIZE, head_dim]`; one pair of tensors a
layer."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """`n` rows of `S` sessions. Flat slot = block * BLOCK_SIZE + offset within the block.

    Row i sees the first `context_lens[i]` committed keys of its session (its own included if it is a causal row, since
    rows are written before anyone reads) and those of its session's tree slots whose bit is set in `tree_mask[i]`
    (itself included if it is a tree row); layers with a window or chunks hide those at too low positions."""

    positions: torch.Tensor  # [n] int64, rotary positions
    sequence_index: torch.Tensor  # [n] int32, row's index into the block tables
    context_lens: torch.Tensor  # [n] int32
    slot_mapping: torch.Tensor  # [n] int64, flat slot the row's key and value go to
    block_tables: torch.Tensor  # [S, max_blocks] int32, committed blocks in order, padded with 0
    tree_block_tables: torch.Tensor  # [S, max_tree_blocks] int32, padded with 0
    tree_mask: torch.Tensor  # [n, words] int64; bit j of word w is tree slot 64 * w + j; words may be 0
    copy_from: torch.Tensor  # [m] int64 flat slots: before the batch, in every layer, the tree slots just committed ...
    copy_to: torch.Tensor  # [m] int64 ... are moved into the committed blocks
    tree_positions: torch.Tensor  # [S, max_tree_blocks * BLOCK_SIZE] int32, rotary positions of the tree slots in use

    @property
    def rows(self) -> int:
        return self.positions.shape[0]
