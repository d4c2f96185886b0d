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
from swarm_kernels.ops.base.layer_weights import Activation, Attention, GatedMlp, LayerWeights, Mixture

LOG2_E = 1.44269504088896


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
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.commit_tree_slots(k_blocks, v_blocks, plan.copy_from, plan.copy_to)
        append(k, v, k_blocks, v_blocks, plan.slot_mapping)
        oldest = first_visible(plan.positions, sliding_window, chunk)
        return attend_written(q, k_blocks, v_blocks, plan, scale, softcap, oldest, sinks)

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
    mixed = _attention(_normed(hidden, w.attn_norm, w.eps), w, cos, sin, k_blocks, v_blocks, plan)
    hidden = _add(hidden, mixed, w.attn_post_norm, w)
    normed = _normed(hidden, w.mlp_norm, w.eps)
    inner = _mixture(normed, w.mlp) if isinstance(w.mlp, Mixture) else _gated_mlp(normed, w.mlp)
    hidden = _add(hidden, inner, w.mlp_post_norm, w)
    return hidden if w.rounding is None else hidden.to(w.rounding).to(hidden.dtype)


def _gated_mlp(x: torch.Tensor, mlp: GatedMlp) -> torch.Tensor:
    gate, up = mlp.gate_up(x).chunk(2, -1)
    return mlp.down(activate(gate, mlp.activation) * up)


def _mixture(x: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    wide = x.float()
    out = mixture.experts(x, *mixture.routing(mixture.router(wide), mixture.correction))
    if mixture.shared is None:
        return out
    shared = _gated_mlp(x, mixture.shared)
    if mixture.shared_gate is not None:
        shared = shared * torch.sigmoid(mixture.shared_gate(wide)).to(x.dtype)
    return out + shared


def _attention(
    hidden: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    plan: AttentionMetadata,
) -> torch.Tensor:
    a, rows = weights.attention, hidden.shape[0]
    packed, queries, keys = a.qkv(hidden), a.heads * a.head_dim, a.kv_heads * a.head_dim
    q, k, v = packed[:, :queries], packed[:, queries:-keys], packed[:, -keys:]
    q, k = head_norm(q, a.q_norm, a, weights.eps), head_norm(k, a.k_norm, a, weights.eps)
    q, k, v = (part.reshape(rows, -1, a.head_dim) for part in (q, k, v))
    if a.rope is not None:
        q, k = apply_rope(q, k, *rotary_table(cos, sin, a.rope))
    mixed = REFERENCE.attend(
        q, k, v, k_blocks, v_blocks, plan, a.scale, a.window, a.softcap, chunk=a.chunk, sinks=a.sinks
    )
    return a.o(mixed.reshape(rows, -1))


def _normed(x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if norm is None else REFERENCE.rms_norm(x, norm, eps)


def _add(hidden: torch.Tensor, part: torch.Tensor, post_norm: torch.Tensor | None, w: LayerWeights) -> torch.Tensor:
    part = _normed(part, post_norm, w.eps)
    return hidden + (part if w.residual_scale == 1 else part * w.residual_scale)


def head_norm(x: torch.Tensor, norm: torch.Tensor | None, attention: Attention, eps: float) -> torch.Tensor:
    """`x [n, heads * head_dim]` normed by `norm`, over each head or over all at once."""
    if norm is None or attention.norm_is_whole:
        return _normed(x, norm, eps)
    return REFERENCE.rms_norm(x.reshape(x.shape[0], -1, attention.head_dim), norm, eps).flatten(1)


def activate(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.SILU:
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none")


def rotary_table(cos: torch.Tensor, sin: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Table `index` of `[tables, n, rot]`; `[n, rot]` is a single one."""
    return (cos, sin) if cos.dim() == 2 else (cos[index], sin[index])


def first_visible(positions: torch.Tensor, window: int | None, chunk: int | None) -> torch.Tensor | None:
    """The first position that each row sees, `[n]` as `positions`; None: all."""
    if window is not None:
        return positions - (window - 1)
    return None if chunk is None else positions - positions % chunk


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
    sinks: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """`AttentionBackend.attend` once the rows' keys and values are in the cache. Values may be of another size than
    keys, which is that of the result, `[n, H, size]`. `oldest [n]`: the first position that each row sees.
    `chosen`: see `AttentionBackend.attend_latent`."""
    out = q.new_empty(*q.shape[:2], v_blocks.shape[3])
    for group in sequence_rows(plan):
        visible = group.visible
        if oldest is not None:
            visible = visible & (group.position >= oldest[group.rows, None])
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
    position: torch.Tensor  # [keys]
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
    return SequenceRows(
        rows=rows,
        blocks=torch.cat((plan.block_tables[sequence, :used], tree_blocks)).long(),
        position=torch.cat((committed, plan.tree_positions[sequence, : slots.numel()].long())),
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
