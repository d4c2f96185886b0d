"""Drafts of a checkpoint's own layer for multi-token prediction (MTP), which reads the target's last states.

Owns its arithmetic outside of the decoder layer, which is a span as any other (`runtime.load`), so that all kinds of
attention and mixtures that are served can draft. The states are what the final norm gives, and a row's own normed
output stands for them beyond the text, as in vLLM and SGLang; the paper does not say. `eagle_session` keeps a text's
keys and values.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from swarm.errors import DrafterFailed
from swarm.types import LayerSpan, Taps
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.draft.eagle_session import EagleSession
from swarm_kernels.draft.models import StateHead, served_dtype
from swarm_kernels.draft.mtp_source import LAYER, MtpBlock, MtpLayout, find_mtp
from swarm_kernels.draft.shared import SharedDrafts
from swarm_kernels.draft.tapped import Pack, target_ends
from swarm_kernels.kvcache.cache import KVCacheManager
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.llama_span import FINAL_NORM
from swarm_kernels.runtime.load import load_span


class MtpDraft:
    """See `TappedDraft` and `ChainedDraft`. On the CPU."""

    kind = "mtp"

    def __init__(
        self,
        target: ModelSource,
        layout: MtpLayout,
        dtype: torch.dtype | None = None,
        pack: Pack = dispatch.quantize_linear,
    ) -> None:
        """`dtype`: of the decoder layer's weights, by default 8 bits where there are kernels for them. `pack`: how
        projection and head are prepared. Raises as `load_span`."""
        block = MtpBlock(target, layout)
        self._span = load_span(block, LayerSpan(LAYER, LAYER + 1), dtype or served_dtype(block.config, "cpu"))
        self.context_length = min(self._span.config.context_length, target.config.context_length)
        self.taps = Taps((target.config.num_layers,), target.config.hidden_size)
        self._eps, self._state_first = target.config.rms_norm_eps, layout.state_first
        names = (layout.embedding_norm, layout.state_norm, layout.norm, FINAL_NORM)
        own = [name for name in (layout.embedding, layout.head) if name]
        target.fetch([*names, layout.projection, *own])
        norms = [target.tensor(name).float() + layout.norm_offset for name in names]
        self._embedding_norm, self._state_norm, self._norm, self._final_norm = norms
        self._projection = pack(target.tensor(layout.projection).float(), None)
        embedding, head = target_ends(
            target, [name for name, is_own in (("embed_tokens", layout.embedding), ("lm_head", layout.head)) if is_own]
        )
        self._embedding = target.tensor(layout.embedding).to(torch.bfloat16) if layout.embedding else embedding
        self._head = pack((target.tensor(layout.head).to(torch.bfloat16) if layout.head else head).float(), None)
        self._ids = torch.arange(target.config.vocab_size)
        self._lock = threading.Lock()  # calls on one span must not overlap

    def new_session(self, max_tokens: int | None = None) -> EagleSession:
        return EagleSession(self, max_tokens)

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return self._span.new_cache(max_tokens)

    @torch.inference_mode()
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return self._normed(tapped.float(), self._final_norm)

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], states: torch.Tensor, plan: AttentionMetadata, cache: KVCacheManager
    ) -> torch.Tensor:
        embedded = self._normed(self._embedding[list(tokens)].float(), self._embedding_norm)
        state = self._normed(states, self._state_norm)
        both = (state, embedded) if self._state_first else (embedded, state)
        with self._lock:
            hidden = self._span.forward(self._projection(torch.cat(both, -1)), plan, cache)
        return self._normed(hidden.float(), self._norm)

    def new_head(self) -> StateHead:
        return StateHead(self._head, self._ids, "the MTP layer")

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return dispatch.rms_norm(x, weight, self._eps)


_SHARED: SharedDrafts[MtpDraft] = SharedDrafts()


def open_mtp(target: ModelSource) -> MtpDraft:
    """The first MTP layer of a checkpoint; clients of one process share it. Raises CorruptModel, DrafterFailed,
    UnsupportedModel, OutOfMemory, and as `ModelSource.fetch`."""
    return _SHARED.open(target.path, target.weight_hash, lambda: _load(target), f"there is no model at {target.path}")


def _load(target: ModelSource) -> MtpDraft:
    layout = find_mtp(target)
    if layout is None:
        raise DrafterFailed(f"{target.name} has no MTP layers; choose another drafter")
    return MtpDraft(target, layout)
