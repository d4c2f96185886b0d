"""A trained drafter that reads hidden states of its target: what `swarm-draft train --kind eagle` makes.

Owns its arithmetic, that of EAGLE-3 (Li et al. 2025) with two differences, which let it be trained in an hour of a CPU:
token and state are projected to one row, as in MTP layers, so that its layers are the target's own kind and run as a
span of them; and its head is the target's, trimmed to frequent tokens and those of the text. `eagle_session` keeps a
text's keys and values, `file` the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from swarm.errors import CorruptModel, DrafterFailed, UnsupportedModel
from swarm.types import LayerSpan, Taps
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.draft.continuation_store import ContinuationStore
from swarm_kernels.draft.eagle_session import EagleSession
from swarm_kernels.draft.file import FINAL_NORM, DraftWeights
from swarm_kernels.draft.models import DraftSource, SharedSpan, TrimmedVocabHead, TrimmedVocabulary
from swarm_kernels.draft.session import DraftCachePolicy
from swarm_kernels.draft.shared import SharedDrafts
from swarm_kernels.kvcache.cache import KVCacheManager
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.load import load_span

FUSE, PROJECTION = "draft.fuse", "draft.projection"
EMBEDDING_NORM, STATE_NORM, TAP_SCALE = "draft.embedding_norm", "draft.state_norm", "draft.tap_scale"


class TappedTrainedDraft:
    """See `TappedDraft` and `ChainedDraft`. On the CPU."""

    kind = "trained draft"

    def __init__(self, weights: DraftWeights, target: ModelSource, dtype: torch.dtype = torch.int8) -> None:
        """`dtype`: of its layers; fp32 for comparisons. Raises DrafterFailed for a draft of another model,
        CorruptModel if its tensors do not fit."""
        card, config = weights.card, target.config
        if card.weight_hash != target.weight_hash:
            raise DrafterFailed(f"the draft was trained for {card.model}, not for {target.name}; train one for it")
        if not config.is_llama_like:
            raise UnsupportedModel(f"{target.name} is a {config.model_type}; drafts are run for Llama-like models only")
        _check(weights, config.hidden_size, config.vocab_size, config.num_layers)
        self.context_length = config.context_length
        self.taps = Taps(card.taps, config.hidden_size)
        self._span = SharedSpan(load_span(DraftSource(weights, target), LayerSpan(0, card.layers), dtype))
        pack = dispatch.quantize_linear if dtype == torch.int8 else dispatch.pack_linear
        tensors = weights.tensors
        self._fuse, self._projection = pack(tensors[FUSE], None), pack(tensors[PROJECTION], None)
        self._scale = tensors[TAP_SCALE]
        self._embedding_norm, self._state_norm = tensors[EMBEDDING_NORM], tensors[STATE_NORM]
        self._norm, self._eps = tensors[FINAL_NORM], config.rms_norm_eps
        self._vocabulary = TrimmedVocabulary(target, weights.vocabulary)
        self.store = ContinuationStore(weights.texts) if len(weights.texts) else None

    def new_session(self, max_tokens: int | None = None, policy: DraftCachePolicy = DraftCachePolicy()) -> EagleSession:
        return EagleSession(self, max_tokens, policy)

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return self._span.new_cache(max_tokens)

    def new_head(self) -> TrimmedVocabHead:
        return self._vocabulary.head(self._norm, self._eps)

    @torch.inference_mode()
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return self._fuse(tapped.float() * self._scale)

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], states: torch.Tensor, plan: AttentionMetadata, cache: KVCacheManager
    ) -> torch.Tensor:
        embedded = dispatch.rms_norm(self._span.embed(tokens), self._embedding_norm, self._eps)
        read = torch.cat((embedded, dispatch.rms_norm(states, self._state_norm, self._eps)), -1)
        return self._span.forward(self._projection(read), plan, cache)


def _check(weights: DraftWeights, hidden: int, vocab_size: int, num_layers: int) -> None:
    """Raises CorruptModel, DrafterFailed."""
    card, tensors = weights.card, weights.tensors
    if list(card.taps) != sorted(set(card.taps)) or card.taps[-1] > num_layers or card.base or not card.layers:
        raise DrafterFailed(f"the draft reads hidden states at {list(card.taps)}, which its model does not have")
    shapes = {
        FUSE: (hidden, len(card.taps) * hidden),
        PROJECTION: (hidden, 2 * hidden),
        TAP_SCALE: (len(card.taps) * hidden,),
        **dict.fromkeys((EMBEDDING_NORM, STATE_NORM, FINAL_NORM), (hidden,)),
    }
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise CorruptModel(f"the draft's {name} has shape {found or 'none'}, not {shape}; train it again")
    if int(weights.vocabulary.max()) >= vocab_size:
        raise CorruptModel("the draft's vocabulary does not fit its model; train it again")


_SHARED: SharedDrafts[TappedTrainedDraft] = SharedDrafts()


def open_tapped_draft(path: Path, target: ModelSource) -> TappedTrainedDraft:
    """Load a draft; clients of one process share it. Raises ModelNotFound, CorruptModel, DrafterFailed,
    UnsupportedModel."""
    missing = f"there is no draft at {path}; make one with 'swarm-draft train'"
    return _SHARED.open(path, target.weight_hash, lambda: TappedTrainedDraft(DraftWeights.load(path), target), missing)
