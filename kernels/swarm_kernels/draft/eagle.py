"""EAGLE-3 drafters (Li et al. 2025): one layer that reads hidden states of the target and writes its own.

Owns their arithmetic. The target's hidden states are three taps, which `fc` makes one; `eagle_session` says what a row
reads, and keeps a text's keys and values.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from swarm.errors import DrafterFailed
from swarm.types import Taps
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.draft.eagle_file import LAYER, EagleWeights, load_eagle
from swarm_kernels.draft.eagle_session import EagleSession
from swarm_kernels.draft.models import StateHead
from swarm_kernels.draft.shared import SharedDrafts
from swarm_kernels.draft.tapped import Pack, stacked_linear
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.llama_span import EMBEDDING
from swarm_kernels.runtime.rope import RopeTables

_CPU = torch.device("cpu")


class EagleDraft:
    """See `TappedDraft` and `ChainedDraft`. On the CPU."""

    kind = "eagle"

    def __init__(self, weights: EagleWeights, embedding: torch.Tensor, pack: Pack = dispatch.quantize_linear) -> None:
        """`embedding [vocab, hidden]`: the target's, for drafters without their own. `pack`: how its linear layers are
        prepared; 8 bits by default, as it reads all of them for every level of a tree."""
        config, tensors = weights.config, weights.tensors
        layer = config.layer
        self.context_length = layer.context_length
        self.taps = Taps(config.taps, config.target_hidden_size)
        self._config = config
        self._ids = weights.token_ids
        self._embedding = tensors.get("embed_tokens.weight", embedding)
        self._norms = {name: tensor.float() for name, tensor in tensors.items() if tensor.dim() == 1}
        self._fc = stacked_linear(tensors, ["fc"], pack)
        self._head = stacked_linear(tensors, ["lm_head"], pack)
        attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
        self._qkv = stacked_linear(tensors, [attention + part for part in ("q_proj", "k_proj", "v_proj")], pack)
        self._o = stacked_linear(tensors, [attention + "o_proj"], pack)
        self._gate_up = stacked_linear(tensors, [mlp + "gate_proj", mlp + "up_proj"], pack)
        self._down = stacked_linear(tensors, [mlp + "down_proj"], pack)
        self._rope = RopeTables((layer.rope,), layer.head_dim, layer.context_length, _CPU)
        self._lock = threading.Lock()  # around the tables, which grow

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        """Of its one layer."""
        layer = self._config.layer
        return KVCacheManager(KvShape(1, layer.num_kv_heads, layer.head_dim, torch.float32), max_tokens)

    def new_session(self, max_tokens: int | None = None) -> EagleSession:
        return EagleSession(self, max_tokens)

    @torch.inference_mode()
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return self._fc(self._norm("input_norm", tapped.float()) if self._config.norm_before_fc else tapped.float())

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], states: torch.Tensor, plan: AttentionMetadata, cache: KVCacheManager
    ) -> torch.Tensor:
        layer, rows = self._config.layer, len(tokens)
        embedded = self._norm(LAYER + "input_layernorm", self._embedding[list(tokens)].float())
        normed = self._norm(LAYER + "hidden_norm", states)
        residual = normed if self._config.norm_before_residual else states
        packed = self._qkv(torch.cat((embedded, normed), -1))
        kv = layer.num_kv_heads * layer.head_dim
        parts = torch.split(packed, [layer.num_heads * layer.head_dim, kv, kv], -1)
        q, k, v = (part.reshape(rows, -1, layer.head_dim) for part in parts)
        with self._lock:
            cos, sin = self._rope.at(plan.positions, cache.top_position)
        q, k = dispatch.apply_rope(q, k, cos, sin)
        mixed = dispatch.attend(q, k, v, cache.k[0], cache.v[0], plan, layer.head_dim**-0.5)
        hidden = residual + self._o(mixed.reshape(rows, -1))
        gate, up = self._gate_up(self._norm(LAYER + "post_attention_layernorm", hidden)).chunk(2, -1)
        return hidden + self._down(F.silu(gate) * up)

    def new_head(self) -> StateHead:
        return StateHead(lambda hidden: self._head(self._norm("norm", hidden)), self._ids, "the EAGLE-3 head")

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return dispatch.rms_norm(x, self._norms[name + ".weight"], self._config.layer.rms_norm_eps)


_SHARED: SharedDrafts[EagleDraft] = SharedDrafts()


def open_eagle(folder: Path, target: ModelSource) -> EagleDraft:
    """Load a drafter; clients of one process share it. Raises ModelNotFound, CorruptModel, DrafterFailed,
    UnsupportedModel."""
    missing = f"there is no drafter at {folder}"
    return _SHARED.open(folder, target.weight_hash, lambda: _load(folder, target), missing)


def _load(folder: Path, target: ModelSource) -> EagleDraft:
    weights = load_eagle(folder, target.config)
    if "embed_tokens.weight" in weights.tensors:
        embedding = weights.tensors["embed_tokens.weight"]
    elif weights.config.layer.hidden_size == target.config.hidden_size:
        target.fetch([EMBEDDING])
        embedding = target.tensor(EMBEDDING).to(torch.bfloat16)
    else:
        raise DrafterFailed(f"the drafter in {folder} has no embedding, and the model's is of another width")
    return EagleDraft(weights, embedding)
