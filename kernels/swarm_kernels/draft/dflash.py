"""DFlash drafters (Chen et al. 2026): a few layers that fill a whole block of masked tokens in one pass.

Owns their arithmetic. In each layer the target's hidden states of the text, projected to one row a token, give keys and
values beside those of the block; the block is the text's last token, whose states nobody has yet, and masks. The row of
a mask says what stands at its own place. `dflash_session` keeps a text's keys and values.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import torch.nn.functional as F

from swarm.types import Taps
from swarm_kernels.draft.dflash_file import BlockLayer, DFlashWeights, load_dflash
from swarm_kernels.draft.dflash_session import Context, DFlashSession
from swarm_kernels.draft.models import finite_candidates
from swarm_kernels.draft.session import DraftCachePolicy, DraftCandidates
from swarm_kernels.draft.shared import SharedDrafts
from swarm_kernels.draft.tapped import Pack, stacked_linear, target_ends
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.rope import RopeTables

_CPU = torch.device("cpu")


class DFlashDraft:
    """See `TappedDraft` and `BlockDraft`. On the CPU."""

    kind = "dflash"

    def __init__(
        self,
        weights: DFlashWeights,
        embedding: torch.Tensor,
        head: torch.Tensor,
        pack: Pack = dispatch.quantize_linear,
    ) -> None:
        """`embedding`, `head` `[vocab, hidden]`: the target's, for drafters without their own. `pack`: how its linear
        layers are prepared; 8 bits by default."""
        config, tensors = weights.config, dict(weights.tensors)
        self._config, self._layer = config, config.layer
        self.context_length, self.block_size = self._layer.context_length, config.block_size
        self.taps = Taps(config.taps, self._layer.hidden_size)
        self._ids = weights.token_ids
        self._embedding = tensors.pop("embed_tokens.weight", embedding)
        tensors.setdefault("lm_head.weight", head)
        self._head = stacked_linear(tensors, ["lm_head"], pack)
        self._fc = stacked_linear(tensors, ["fc"], pack)
        self._norms = {name: tensor.float() for name, tensor in tensors.items() if tensor.dim() == 1}
        attention = [f"layers.{index}.self_attn." for index in range(len(config.layers))]
        mlp = [f"layers.{index}.mlp." for index in range(len(config.layers))]
        self._q = [stacked_linear(tensors, [name + "q_proj"], pack) for name in attention]
        self._kv = [stacked_linear(tensors, [name + "k_proj", name + "v_proj"], pack) for name in attention]
        self._o = [stacked_linear(tensors, [name + "o_proj"], pack) for name in attention]
        self._gate_up = [stacked_linear(tensors, [name + "gate_proj", name + "up_proj"], pack) for name in mlp]
        self._down = [stacked_linear(tensors, [name + "down_proj"], pack) for name in mlp]
        self._rope = RopeTables((self._layer.rope,), self._layer.head_dim, self.context_length, _CPU)
        self._lock = threading.Lock()  # around the tables, which grow

    def new_session(
        self, max_tokens: int | None = None, policy: DraftCachePolicy = DraftCachePolicy()
    ) -> DFlashSession:
        return DFlashSession(self, max_tokens, policy)

    @torch.inference_mode()
    def project(self, tapped: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._norm("hidden_norm", self._fc(tapped.float()))
        pairs = [self._keys_values(index, states, positions) for index in range(len(self._config.layers))]
        keys, values = zip(*pairs, strict=True)
        return torch.stack(keys, 1), torch.stack(values, 1)

    @torch.inference_mode()
    def fill(self, last_token: int, position: int, context: Context) -> torch.Tensor:
        block = [last_token] + [self._config.mask_token] * (self.block_size - 1)
        positions = torch.arange(position, position + self.block_size)
        hidden = self._embedding[block].float() * self._config.embedding_scale
        for index, kind in enumerate(self._config.layers):
            name = f"layers.{index}."
            normed = self._norm(name + "input_layernorm", hidden)
            keys, values = self._keys_values(index, normed, positions)
            mixed = _attend(
                self._queries(index, normed, positions),
                torch.cat((context.keys[:, index], keys)),
                torch.cat((context.values[:, index], values)),
                _mask(kind, positions, torch.cat((context.positions, positions))),
            )
            hidden = hidden + self._o[index](mixed)
            gate, up = self._gate_up[index](self._norm(name + "post_attention_layernorm", hidden)).chunk(2, -1)
            hidden = hidden + self._down[index](F.silu(gate) * up)
        return self._norm("norm", hidden)[1:]

    @torch.inference_mode()
    def propose(self, hidden: torch.Tensor, width: int) -> list[DraftCandidates]:
        logits = self._head(hidden).float() * self._config.logit_scale
        if (cap := self._config.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return finite_candidates(logits, width, self._ids, "the DFlash drafter")

    def _queries(self, index: int, normed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[n, heads, head_dim]`, rotated."""
        q = self._q[index](normed).reshape(len(normed), -1, self._layer.head_dim)
        return self._rotated(self._norm(f"layers.{index}.self_attn.q_norm", q), positions)

    def _keys_values(
        self, index: int, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two `[n, kv_heads, head_dim]`."""
        k, v = self._kv[index](rows).reshape(len(rows), 2, -1, self._layer.head_dim).unbind(1)
        return self._rotated(self._norm(f"layers.{index}.self_attn.k_norm", k), positions), v

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with self._lock:
            cos, sin = self._rope.at(positions, int(positions.max()))
        return dispatch.apply_rope(x, x[:, :0], cos, sin)[0]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return dispatch.rms_norm(x, self._norms[name + ".weight"], self._layer.rms_norm_eps)


def _mask(kind: BlockLayer, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`[rows, keys]`, by their positions: which keys each row sees."""
    ahead = keys[None] - rows[:, None]
    seen = ahead <= 0 if kind.causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if kind.window is None else seen & (ahead.abs() < kind.window)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`q [n, heads, d]`, `k`, `v` `[m, kv_heads, d]`, `mask [n, m]` -> `[n, heads * d]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


_SHARED: SharedDrafts[DFlashDraft] = SharedDrafts()


def open_dflash(folder: Path, target: ModelSource) -> DFlashDraft:
    """Load a drafter; clients of one process share it. Raises ModelNotFound, CorruptModel, DrafterFailed,
    UnsupportedModel."""
    missing = f"there is no drafter at {folder}"
    return _SHARED.open(folder, target.weight_hash, lambda: _load(folder, target), missing)


def _load(folder: Path, target: ModelSource) -> DFlashDraft:
    weights = load_dflash(folder, target.config)
    embedding, head = target_ends(
        target, [name for name in ("embed_tokens", "lm_head") if name + ".weight" in weights.tensors]
    )
    return DFlashDraft(weights, embedding, head)
