"""Stands in for transformers' cache where a layer asks how many tokens came before, instead of its positions.

Owns no keys and values: `update` hands back what it was given. A layer adds `arange(rows)` to what `get_seq_length`
answers; so that rows of many sessions get their own positions, the answer may be a tensor."""

from __future__ import annotations

from typing import Any

import torch


class PositionsAsCache:
    """Quacks like `transformers.Cache` for layers that only ask for lengths."""

    is_compileable = False

    def __init__(self, before: int | torch.Tensor) -> None:
        """`before`: tokens before the first row; or of each row, less its index, `[n]`."""
        self._before = before

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0 if isinstance(self._before, torch.Tensor) else self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """-> (key length, position of the first key)."""
        return query_length, self.get_query_offset(layer_idx)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> torch.Tensor:
        return keys

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its layers ask the cache for {name}")


def of_rows(positions: torch.Tensor) -> PositionsAsCache:
    """`positions [n]` of packed rows."""
    return PositionsAsCache(positions - torch.arange(positions.shape[0], device=positions.device))
