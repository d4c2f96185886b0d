"""Sparse indexers of latent attention (DeepSeek V3.2, GLM-5): which `index_topk` keys of a long text a row attends to.

transformers' own indexer code scores keys and chooses, on the index keys of a row's whole session: these are cached in
place of values, which a latent cache has none of. As long as every row sees at most `index_topk` keys, all are chosen,
and nothing is scored.

Owns the wrappers of the indexers and what they chose. `hf_attention` attends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.torch_reference import SequenceRows, packed_bits, sequence_rows
from swarm_kernels.runtime.hf_attention import ATTENTION, BatchContext, ChosenKeys, running_batch

_SCORES = 1 << 26  # of one piece of a step's rows: fp32 numbers in memory at once


class _Taken(Exception):
    """Ends an indexer's forward once its keys are known. Never leaves this module."""

    def __init__(self, keys: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys


class _TakeKeys:
    """Stands for transformers' cache where keys are all that is wanted."""

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> torch.Tensor:
        raise _Taken(keys)


class _SessionKeys:
    """Stands for transformers' cache: stores the keys of some rows, and answers with all of their session."""

    def __init__(self, blocks: torch.Tensor, of_session: torch.Tensor, slots: torch.Tensor) -> None:
        """`blocks [blocks, 1, BLOCK_SIZE, size]`; the session's own; `slots`: where the rows' keys go."""
        self._blocks, self._of_session, self._slots = blocks, of_session, slots
        self.keys = blocks.new_empty(0)

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> torch.Tensor:
        self.keys = keys[0]
        self._blocks[self._slots // BLOCK_SIZE, 0, self._slots % BLOCK_SIZE] = keys[0].to(self._blocks.dtype)
        return self._blocks[self._of_session, 0].flatten(0, 1)[None].to(keys.dtype)


def choose_keys(attention_modules: Sequence[Any], of_model: Sequence[Any]) -> int:
    """Let the indexers of a span's attention modules choose among all keys of a session. -> the size of an index key,
    which the cache has to hold; 0, and nothing has changed, unless every module `of_model` has an indexer, all of the
    same size: a layer that takes over the choice of another one (GLM-5.2) may be the first of a span."""
    if not attention_modules:
        return 0
    indexers = [getattr(module, "indexer", None) for module in of_model]
    sizes = {(getattr(i, "head_dim", None), getattr(i, "index_topk", None)) for i in indexers}
    if len(sizes) != 1 or not all(isinstance(size, int) for size in next(iter(sizes))):
        return 0
    for module in attention_modules:
        _wrap(module.indexer, int(module.layer_idx))
    return int(next(iter(sizes))[0] or 0)


def _wrap(indexer: Any, layer: int) -> None:
    choose = indexer.forward  # bound to the module

    def forward(
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        batch = running_batch()
        if indexer.config._attn_implementation != ATTENTION or batch is None or batch.cache is None:
            chosen: torch.Tensor = choose(
                hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past_key_values
            )
            return chosen

        def of_rows(rows: slice, mask: torch.Tensor, keys: _TakeKeys | _SessionKeys) -> torch.Tensor:
            embeddings = tuple(part[:, rows] for part in position_embeddings)
            chosen: torch.Tensor = choose(
                hidden_states[:, rows], q_resid[:, rows], embeddings, mask, position_ids, past_key_values=keys
            )
            return chosen

        batch.chosen_keys = _choice(batch, batch.cache.v[layer - batch.first_layer], indexer, of_rows)
        return torch.zeros(1, hidden_states.shape[1], 1, dtype=torch.int32, device=hidden_states.device)

    indexer.forward = forward


_Choose = Callable[[slice, torch.Tensor, Any], torch.Tensor]


def _choice(batch: BatchContext, blocks: torch.Tensor, indexer: Any, choose: _Choose) -> ChosenKeys:
    plan, rows = batch.metadata, batch.metadata.rows
    if _most_keys(plan) <= indexer.index_topk:
        try:
            choose(slice(0, rows), torch.ones(1, rows, rows, dtype=torch.bool, device=blocks.device), _TakeKeys())
        except _Taken as taken:
            return ChosenKeys(taken.keys[0], None, plan)
        raise RuntimeError("an indexer did not store its keys")
    keys, dense, sparse = [], [], []
    for group in sequence_rows(plan):
        assert torch.equal(group.rows, torch.arange(int(group.rows[0]), int(group.rows[-1]) + 1))  # one step a session
        for piece in _pieces(group, int(indexer.n_heads)):
            mask = group.visible[piece.start - int(group.rows[0]) : piece.stop - int(group.rows[0])]
            session = _SessionKeys(blocks, group.blocks, plan.slot_mapping[piece])
            found = choose(piece, mask[None], session)[0].long()
            seen = torch.zeros_like(mask).scatter_(1, found, True) & mask
            keys.append(session.keys)
            split = seen.shape[1] - group.tree_slots
            dense.append(packed_bits(seen[:, :split]))
            sparse.append(packed_bits(seen[:, split:]))
    narrowed = replace(plan, tree_mask=_joined(sparse, plan.tree_mask.shape[1]))
    return ChosenKeys(torch.cat(keys), _joined(dense, max(part.shape[1] for part in dense)), narrowed)


def _most_keys(plan: AttentionMetadata) -> int:
    """At least as many as any row sees."""
    return int(plan.context_lens.max()) + 64 * plan.tree_mask.shape[1]


def _pieces(group: SequenceRows, heads: int) -> list[slice]:
    """The rows of a session in order, so many at a time that their scores fit: a row sees keys of earlier pieces."""
    first, count = int(group.rows[0]), len(group.rows)
    most = max(1, _SCORES // (heads * max(1, group.visible.shape[1])))
    return [slice(first + at, first + min(at + most, count)) for at in range(0, count, most)]


def _joined(parts: Sequence[torch.Tensor], words: int) -> torch.Tensor:
    """`[n, words]`, parts of fewer words filled with zeros."""
    return torch.cat([torch.nn.functional.pad(part, (0, words - part.shape[1])) for part in parts])
