"""The reference backend: the ops in plain torch, on any device and dtype.

Every other backend must match it. The dispatcher falls back to it, and tests compare against it. Uses no compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.backend import AttentionBackend, LayerCache, LayerStack
from swarm_kernels.ops.base.layer_weights import LayerWeights

LOG2_E = 1.44269504088896
_TREE = torch.iinfo(torch.int64).max  # position of a tree slot where none is known: after every row


class ReferenceBackend(AttentionBackend):
    """Supports every shape, dtype and device."""

    def supports_cache(self, k_blocks: torch.Tensor) -> bool:
        return True

    def supports_norm(self, x: torch.Tensor) -> bool:
        return True

    def supports_layers(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache], dtype: torch.dtype) -> bool:
        return True

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_blocks: torch.Tensor,
        v_blocks: torch.Tensor,
        plan: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        oldest = None if sliding_window is None else plan.positions - (sliding_window - 1)
        return self.attend_exactly(q, k, v, k_blocks, v_blocks, plan, scale, softcap, oldest)

    def attend_exactly(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_blocks: torch.Tensor,
        v_blocks: torch.Tensor,
        plan: AttentionMetadata,
        scale: float,
        softcap: float | None = None,
        oldest: torch.Tensor | None = None,
        tree_positions: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attend`, where row i sees no key before position `oldest[i]` (`[n]` int64).

        `tree_positions` `[flat slots]` int64: the positions of tree slots, without which `oldest` cuts committed keys
        only. `sinks [H]`: a score per query head that takes part in the softmax and has no value.
        """
        self.commit_tree_slots(k_blocks, v_blocks, plan.copy_from, plan.copy_to)
        append(k, v, k_blocks, v_blocks, plan.slot_mapping)
        return attend_written(q, k_blocks, v_blocks, plan, scale, softcap, oldest, tree_positions, sinks)

    def supports_latent(self, k_blocks: torch.Tensor, value_dim: int) -> bool:
        return True

    def attend_latent(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_blocks: torch.Tensor,
        v_blocks: torch.Tensor,
        plan: AttentionMetadata,
        scale: float,
        value_dim: int,
        softcap: float | None = None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.commit_tree_slots(k_blocks, v_blocks, plan.copy_from, plan.copy_to)
        append(k, v, k_blocks, v_blocks, plan.slot_mapping)
        values = k_blocks[:, :, :value_dim].transpose(2, 3)
        return attend_written(q, k_blocks, values, plan, scale, softcap, chosen=chosen)

    def commit_tree_slots(
        self, k_blocks: torch.Tensor, v_blocks: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor
    ) -> None:
        if copy_from.numel() == 0:
            return
        keys, values = _key_slots(k_blocks), _value_slots(v_blocks)
        source, target = _split_slots(copy_from), _split_slots(copy_to)
        keys[target] = keys[source]
        values[target] = values[source]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)

    def _prepare(self, layers: Sequence[LayerWeights], caches: Sequence[LayerCache]) -> LayerStack:
        return _ReferenceStack(layers, caches)


REFERENCE = ReferenceBackend()


class _ReferenceStack(LayerStack):
    def run(
        self,
        hidden: torch.Tensor,
        layers: Sequence[LayerWeights],
        cos: torch.Tensor,
        sin: torch.Tensor,
        caches: Sequence[LayerCache],
        plan: AttentionMetadata,
    ) -> torch.Tensor:
        for weights, (k_blocks, v_blocks) in zip(layers, caches, strict=True):
            hidden = decoder_layer(hidden, weights, cos, sin, k_blocks, v_blocks, plan)
        return hidden


def decoder_layer(
    hidden: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
) -> torch.Tensor:
    """One layer of a stack, see `LayerStack.run`; unchecked."""
    w = weights
    rows = hidden.shape[0]
    packed = w.qkv(REFERENCE.rms_norm(hidden, w.attn_norm, w.eps)).view(rows, w.heads + 2 * w.kv_heads, w.head_dim)
    q, k, v = packed[:, : w.heads], packed[:, w.heads : -w.kv_heads], packed[:, -w.kv_heads :]
    if w.q_norm is not None:
        q = REFERENCE.rms_norm(q, w.q_norm, w.eps)
    if w.k_norm is not None:
        k = REFERENCE.rms_norm(k, w.k_norm, w.eps)
    q, k = apply_rope(q, k, cos, sin)
    mixed = REFERENCE.attend(q, k, v, k_blocks, v_blocks, plan, w.scale)
    hidden = hidden + w.o(mixed.reshape(rows, -1))
    gate, up = w.gate_up(REFERENCE.rms_norm(hidden, w.mlp_norm, w.eps)).chunk(2, -1)
    return hidden + w.down(F.silu(gate) * up)


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first `rot` dimensions of each head by Hugging Face's convention (halves, not interleaved pairs).

    `q [n, H, D]`, `k [n, G, D]`, `cos` and `sin` `[n, rot]` (both halves given), rot <= D.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rot = cos.shape[-1]
    rotated = x[..., :rot].float()
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos.float()[:, None] + torch.cat((-second, first), -1) * sin.float()[:, None]
    return torch.cat((rotated.to(x.dtype), x[..., rot:]), -1)


def attend_written(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
    scale: float,
    softcap: float | None = None,
    oldest: torch.Tensor | None = None,
    tree_positions: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ReferenceBackend.attend_exactly` once the rows' keys and values are in the cache. Values may be of another size
    than keys, which is that of the result, `[n, H, size]`. `chosen`: see `AttentionBackend.attend_latent`."""
    out = q.new_empty(*q.shape[:2], v_blocks.shape[3])
    for group in sequence_rows(plan):
        visible = group.visible
        if oldest is not None:
            position = group.position
            if tree_positions is not None:
                known = tree_positions.view(-1, BLOCK_SIZE)[group.blocks].flatten()
                position = torch.where(position == _TREE, known, position)
            visible = visible & (position >= oldest[group.rows, None])
        if chosen is not None:
            dense = visible.shape[1] - group.tree_slots
            seen = unpacked_bits(chosen[group.rows], dense)
            visible = torch.cat((visible[:, :dense] & seen, visible[:, dense:]), 1)
        keys = _key_slots(k_blocks)[group.blocks].flatten(0, 1).to(q.dtype)  # [keys, G, D]
        values = _value_slots(v_blocks)[group.blocks].flatten(0, 1).to(q.dtype)
        rounding = torch.bfloat16 if k_blocks.dtype == torch.bfloat16 else torch.float32
        out[group.rows] = _softmax_sum(q[group.rows], keys, values, visible, scale, softcap, rounding, sinks)
    return out


def append(
    k: torch.Tensor, v: torch.Tensor, k_blocks: torch.Tensor, v_blocks: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store `k` and `v` `[n, G, D]` at flat slots `slot_mapping [n]`, in place, rounded to the cache's dtype."""
    slots = _split_slots(slot_mapping)
    _key_slots(k_blocks)[slots] = k.to(k_blocks.dtype)
    _value_slots(v_blocks)[slots] = v.to(v_blocks.dtype)


def _split_slots(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat // BLOCK_SIZE, flat % BLOCK_SIZE


def _key_slots(k_blocks: torch.Tensor) -> torch.Tensor:
    return k_blocks.permute(0, 3, 1, 2)  # [blocks, BLOCK_SIZE, G, D]


def _value_slots(v_blocks: torch.Tensor) -> torch.Tensor:
    return v_blocks.transpose(1, 2)  # [blocks, BLOCK_SIZE, G, D]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """The rows of one sequence, the KV blocks they may attend to, and each row's visibility mask."""

    rows: torch.Tensor  # [r]
    blocks: torch.Tensor  # committed blocks, then tree blocks
    position: torch.Tensor  # [keys] of committed keys; tree slots: larger than any
    visible: torch.Tensor  # [r, keys] bool
    tree_slots: int  # how many of the keys, the last, are tree slots


_cached_rows: tuple[AttentionMetadata, list[SequenceRows]] | None = None  # of the last plan: every layer uses it


def sequence_rows(plan: AttentionMetadata) -> list[SequenceRows]:
    global _cached_rows
    cached = _cached_rows
    if cached is not None and cached[0] is plan:
        return cached[1]
    context_lens = plan.context_lens.cpu()
    sequence = plan.sequence_index.cpu()
    groups = []
    for index in sorted(set(sequence.tolist())):
        rows = (sequence == index).nonzero().flatten()
        groups.append(_group(plan, rows.to(plan.context_lens.device), index, int(context_lens[rows].max())))
    _cached_rows = (plan, groups)
    return groups


def _group(plan: AttentionMetadata, rows: torch.Tensor, sequence: int, max_context: int) -> SequenceRows:
    device = rows.device
    used = -(-max_context // BLOCK_SIZE)
    committed = torch.arange(used * BLOCK_SIZE, device=device)
    dense = committed < plan.context_lens[rows, None]
    words = plan.tree_mask.shape[1]
    tree_blocks = plan.tree_block_tables[sequence][: -(-words * 64 // BLOCK_SIZE)]
    slots = torch.arange(tree_blocks.numel() * BLOCK_SIZE, device=device)
    sparse = unpacked_bits(plan.tree_mask[rows], slots.numel())
    unbounded = torch.full_like(slots, _TREE)
    return SequenceRows(
        rows=rows,
        blocks=torch.cat((plan.block_tables[sequence, :used], tree_blocks)).long(),
        position=torch.cat((committed, unbounded)),
        visible=torch.cat((dense, sparse), 1),
        tree_slots=slots.numel(),
    )


def unpacked_bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """`words [r, any]` int64 -> their first `count` bits, `[r, count]` bool."""
    bits = torch.arange(count, device=words.device)
    return (words[:, bits // 64] >> (bits % 64) & 1).bool()


def packed_bits(visible: torch.Tensor) -> torch.Tensor:
    """`[r, count]` bool -> `[r, count / 64 rounded up]` int64, the inverse of `unpacked_bits`."""
    padded = F.pad(visible, (0, -visible.shape[1] % 64))
    words = padded.view(len(visible), padded.shape[1] // 64, 64).long()
    packed: torch.Tensor = (words << torch.arange(64, device=visible.device)).sum(-1)
    return packed


def _softmax_sum(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
    rounding: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`q [r, H, D]`, `keys [keys, G, D]`, `values [keys, G, E]`, `visible [r, keys]` -> `[r, H, E]`; zeros if no key is
    visible.

    Scaled queries and attention weights are rounded to `rounding`, as the compiled kernels do; weights are relative to
    a power of two, so the rounding does not depend on the row maximum. Scores are in units of log2.
    """
    rows, heads, dim = q.shape
    groups = keys.shape[1]
    factor = torch.tensor(scale, dtype=torch.float32) * (LOG2_E if softcap is None else 1.0)
    split = (q.float() * factor).to(rounding).float().view(rows, groups, heads // groups, dim)
    scores = torch.einsum("rgjd,kgd->rgjk", split, keys.float())
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * (softcap * LOG2_E)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    peaks = scores.amax(-1, keepdim=True).ceil() if len(keys) else scores.new_zeros((*scores.shape[:-1], 1))
    weights = torch.exp2(scores - peaks).masked_fill(~visible[:, None, None], 0.0).to(rounding).float()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp2(sinks.float().view(1, groups, -1, 1) * LOG2_E - peaks)
    weights = weights / total.masked_fill(~visible.any(1)[:, None, None, None], 1.0)
    seen = visible.any(0)[:, None, None]  # a masked slot may hold infinities left by another sequence
    mixed = torch.einsum("rgjk,kgd->rgjd", weights, values.float().masked_fill(~seen, 0.0))
    return mixed.reshape(rows, heads, values.shape[-1]).to(q.dtype)
