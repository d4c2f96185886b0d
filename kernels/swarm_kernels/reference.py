"""The kernels in plain torch: what every compiled implementation must compute, on any device and dtype.

Each public name has a twin of the same name in `ops`, which is what the rest of the code calls; this module is its
fallback, the yardstick of its tests, and the path of devices without compiled kernels. Knows no compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from swarm_kernels.batch import PAGE, BatchPlan

LOG2_E = 1.44269504088896


class Linear(Protocol):
    """`y = x W^T + b` with weights prepared once: `x [n, in_features]` -> `[n, out_features]` of x's dtype."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The weights of outputs `ids [n]`, `[n, in_features]`: a head that is tied to the embedding serves as it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """torch's own linear in the weight's dtype, whatever the dtype of `x`."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerWeights:
    """One Llama-like decoder layer: pre-norm attention with rotary positions, then a gated SiLU MLP.

    `qkv` stacks the query, key and value projections by output, `gate_up` the gate and up projections. `q_norm` and
    `k_norm` are Qwen3's RMS norms of each head. Norm weights are `[hidden]` and `[head_dim]`.
    """

    attn_norm: torch.Tensor
    qkv: Linear  # hidden -> (heads + 2 kv_heads) head_dim
    o: Linear  # heads head_dim -> hidden
    mlp_norm: torch.Tensor
    gate_up: Linear  # hidden -> 2 intermediate
    down: Linear  # intermediate -> hidden
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of the attention scores, usually head_dim ** -0.5
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Prepare `[N, K]` weights; here nothing but a name for them."""
    return PlainLinear(weight, None if bias is None else bias.to(weight.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in fp32, in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first `rot` dimensions of each head by Hugging Face's convention (halves, not interleaved pairs).

    `q [n, H, D]`, `k [n, G, D]`, `cos` and `sin` `[n, rot]` (both halves given), rot <= D.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rot = cos.shape[-1]
    turned = x[..., :rot].float()
    first, second = turned.chunk(2, -1)
    turned = turned * cos.float()[:, None] + torch.cat((-second, first), -1) * sin.float()[:, None]
    return torch.cat((turned.to(x.dtype), x[..., rot:]), -1)


def move_slots(k_pages: torch.Tensor, v_pages: torch.Tensor, copy_from: torch.Tensor, copy_to: torch.Tensor) -> None:
    """Copy keys and values at flat slots `copy_from [m]` to `copy_to [m]`, in place; reads all before writing any."""
    if copy_from.numel() == 0:
        return
    keys, values = _key_slots(k_pages), _value_slots(v_pages)
    source, target = _split_slots(copy_from), _split_slots(copy_to)
    keys[target] = keys[source]
    values[target] = values[source]


def append(k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, write: torch.Tensor) -> None:
    """Store `k` and `v` `[n, G, D]` at flat slots `write [n]`, in place, rounded to the cache's dtype."""
    slots = _split_slots(write)
    _key_slots(k_pages)[slots] = k.to(k_pages.dtype)
    _value_slots(v_pages)[slots] = v.to(v_pages.dtype)


def _split_slots(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat // PAGE, flat % PAGE


def _key_slots(k_pages: torch.Tensor) -> torch.Tensor:
    return k_pages.permute(0, 3, 1, 2)  # [pages, PAGE, G, D]


def _value_slots(v_pages: torch.Tensor) -> torch.Tensor:
    return v_pages.transpose(1, 2)  # [pages, PAGE, G, D]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The rows of one session, the keys they may see, and which of them each row does."""

    rows: torch.Tensor  # [r]
    pages: torch.Tensor  # committed pages, then tree pages
    position: torch.Tensor  # [keys] committed keys: their position; tree slots: larger than any
    visible: torch.Tensor  # [r, keys] bool


_groups_of: tuple[BatchPlan, list[_Group]] | None = None  # of the last plan: a batch asks once a layer


def _groups(plan: BatchPlan) -> list[_Group]:
    global _groups_of
    known = _groups_of
    if known is not None and known[0] is plan:
        return known[1]
    past = plan.past.cpu()
    session = plan.session.cpu()
    groups = []
    for index in sorted(set(session.tolist())):
        rows = (session == index).nonzero().flatten()
        groups.append(_group(plan, rows.to(plan.past.device), index, int(past[rows].max())))
    _groups_of = (plan, groups)
    return groups


def _group(plan: BatchPlan, rows: torch.Tensor, session: int, longest: int) -> _Group:
    device = rows.device
    used = -(-longest // PAGE)
    committed = torch.arange(used * PAGE, device=device)
    dense = committed < plan.past[rows, None]
    words = plan.tree_mask.shape[1]
    tree_pages = plan.tree_pages[session][: -(-words * 64 // PAGE)]
    slots = torch.arange(tree_pages.numel() * PAGE, device=device)
    if slots.numel():
        sparse = (plan.tree_mask[rows][:, slots // 64] >> (slots % 64) & 1).bool()
    else:
        sparse = dense[:, :0]
    endless = torch.full_like(slots, torch.iinfo(torch.int64).max)
    return _Group(
        rows=rows,
        pages=torch.cat((plan.pages[session, :used], tree_pages)).long(),
        position=torch.cat((committed, endless)),
        visible=torch.cat((dense, sparse), 1),
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `ops.attend`."""
    move_slots(k_pages, v_pages, plan.copy_from, plan.copy_to)
    append(k, v, k_pages, v_pages, plan.write)
    out = torch.empty_like(q)
    for group in _groups(plan):
        visible = group.visible
        if sliding_window is not None:
            visible = visible & (group.position > plan.positions[group.rows, None] - sliding_window)
        keys = _key_slots(k_pages)[group.pages].flatten(0, 1).to(q.dtype)  # [keys, G, D]
        values = _value_slots(v_pages)[group.pages].flatten(0, 1).to(q.dtype)
        rounding = torch.bfloat16 if k_pages.dtype == torch.bfloat16 else torch.float32
        out[group.rows] = _softmax_sum(q[group.rows], keys, values, visible, scale, softcap, rounding)
    return out


def _softmax_sum(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
    rounding: torch.dtype,
) -> torch.Tensor:
    """`q [r, H, D]`, `keys`, `values` `[keys, G, D]`, `visible [r, keys]` -> `[r, H, D]`; zero where none is seen.

    Queries, times the scale, and weights are rounded to `rounding`: weights over a power of two, which then does not
    matter. Scores are log2 of the weights.
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
    weights = weights / weights.sum(-1, keepdim=True).masked_fill(~visible.any(1)[:, None, None, None], 1.0)
    seen = visible.any(0)[:, None, None]  # a slot nobody sees may hold another session's infinities
    mixed = torch.einsum("rgjk,kgd->rgjd", weights, values.float().masked_fill(~seen, 0.0))
    return mixed.reshape(rows, heads, dim).to(q.dtype)


def decoder_layer(
    hidden: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: BatchPlan,
) -> torch.Tensor:
    """See `ops.decoder_layer`."""
    w = weights
    rows = hidden.shape[0]
    packed = w.qkv(rms_norm(hidden, w.attn_norm, w.eps)).view(rows, w.heads + 2 * w.kv_heads, w.head_dim)
    q, k, v = packed[:, : w.heads], packed[:, w.heads : -w.kv_heads], packed[:, -w.kv_heads :]
    if w.q_norm is not None:
        q = rms_norm(q, w.q_norm, w.eps)
    if w.k_norm is not None:
        k = rms_norm(k, w.k_norm, w.eps)
    q, k = apply_rope(q, k, cos, sin)
    mixed = attend(q, k, v, k_pages, v_pages, plan, w.scale)
    hidden = hidden + w.o(mixed.reshape(rows, -1))
    gate, up = w.gate_up(rms_norm(hidden, w.mlp_norm, w.eps)).chunk(2, -1)
    return hidden + w.down(F.silu(gate) * up)


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerWeights],
    cos: torch.Tensor,
    sin: torch.Tensor,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plan: BatchPlan,
) -> torch.Tensor:
    """See `ops.decoder_layers`."""
    for weights, (k_pages, v_pages) in zip(layers, caches, strict=True):
        hidden = decoder_layer(hidden, weights, cos, sin, k_pages, v_pages, plan)
    return hidden
