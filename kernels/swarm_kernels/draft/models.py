"""Draft models: a whole local model, or a trained draft on top of the target's embedding and first layers.

Owns loading them and selecting their likeliest tokens. `draft.session` keeps their keys and values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from swarm.errors import CorruptModel, DrafterFailed, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.draft.continuation_store import ContinuationStore
from swarm_kernels.draft.file import FINAL_NORM, DraftWeights
from swarm_kernels.draft.session import DraftCandidates
from swarm_kernels.draft.shared import SharedDrafts
from swarm_kernels.kvcache.cache import KVCacheManager
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import FetchProgress, ModelSource, NotQuantized
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.llama_span import EMBEDDING, HEAD
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span

_STORED = torch.bfloat16  # of the target's head, from which rows are taken


def served_dtype(config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """8 bits where there are kernels for them: a draft model reads all of its weights for every tree level."""
    return torch.int8 if config.has_fast_path and torch.device(device).type == "cpu" else torch.bfloat16


class LocalModel:
    """A whole model on this machine. See `session.DraftModel`."""

    def __init__(self, source: ModelSource, device: torch.device | str = "cpu") -> None:
        """Raises as `load_span`."""
        dtype = served_dtype(source.config, device)
        self._span = SharedSpan(load_span(source, LayerSpan(0, source.config.num_layers), dtype, device))
        self.context_length = source.config.context_length

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return self._span.new_cache(max_tokens)

    def run(self, tokens: Sequence[int], metadata: AttentionMetadata, cache: KVCacheManager) -> torch.Tensor:
        return self._span.run(tokens, metadata, cache)

    def new_head(self) -> FullHead:
        return FullHead(self._span)


class FullHead:
    """Proposes any token of the vocabulary."""

    def __init__(self, span: SharedSpan) -> None:
        self._span = span

    def allow(self, tokens: Sequence[int]) -> None:
        """Nothing to do: all tokens are allowed."""

    def propose(self, hidden: torch.Tensor, width: int) -> list[DraftCandidates]:
        return candidate_pairs(*top_tokens(self._span.logits(hidden), width))


class TrainedDraft:
    """The target's first layers, a few trained ones, and a head trimmed to frequent tokens and those of the text."""

    def __init__(self, weights: DraftWeights, target: ModelSource) -> None:
        """Raises DrafterFailed for a draft of another model, CorruptModel if its tensors do not fit."""
        card, config = weights.card, target.config
        if card.weight_hash != target.weight_hash:
            raise DrafterFailed(f"the draft was trained for {card.model}, not for {target.name}; train one for it")
        if not config.is_llama_like:
            raise UnsupportedModel(f"{target.name} is a {config.model_type}; drafts are run for Llama-like models only")
        if card.taps:
            raise DrafterFailed("this draft reads hidden states; it is no draft of tokens alone")
        if card.heads:
            raise DrafterFailed("these are Medusa heads, which a node runs: 'swarm-node join --medusa-heads FILE'")
        norm = weights.tensors.get(FINAL_NORM)
        fits = norm is not None and tuple(norm.shape) == (config.hidden_size,)
        if norm is None or not fits or int(weights.vocabulary.max()) >= config.vocab_size:
            raise CorruptModel("the draft's final norm or vocabulary does not fit its model; train it again")
        self.context_length = config.context_length
        layers = LayerSpan(0, card.base + card.layers)
        self._span = SharedSpan(load_span(DraftSource(weights, target), layers, torch.int8))
        self._norm, self._eps = norm, config.rms_norm_eps
        self._vocabulary = TrimmedVocabulary(target, weights.vocabulary)
        self.store = ContinuationStore(weights.texts) if len(weights.texts) else None

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return self._span.new_cache(max_tokens)

    def run(self, tokens: Sequence[int], metadata: AttentionMetadata, cache: KVCacheManager) -> torch.Tensor:
        return self._span.run(tokens, metadata, cache)

    def new_head(self) -> TrimmedVocabHead:
        return self._vocabulary.head(self._norm, self._eps)


class TrimmedVocabulary:
    """The target's head and its rows for frequent tokens, which all texts share."""

    def __init__(self, target: ModelSource, frequent: torch.Tensor) -> None:
        """`frequent [v]`: ids."""
        name = HEAD if target.has(HEAD) and not target.config.tie_word_embeddings else EMBEDDING
        self._rows = target.tensor(name).to(_STORED)
        self._frequent = frequent, dispatch.quantize_linear(self._rows[frequent])
        self._known = frozenset(frequent.tolist())

    def head(self, norm: torch.Tensor, eps: float) -> TrimmedVocabHead:
        """Of one text, after a final norm."""
        return TrimmedVocabHead(self._rows, self._frequent, self._known, norm, eps)


class TrimmedVocabHead:
    """Proposes frequent tokens, which all texts share, and tokens of its own text."""

    def __init__(
        self,
        rows: torch.Tensor,
        frequent: tuple[torch.Tensor, dispatch.Linear],
        known: frozenset[int],
        norm: torch.Tensor,
        eps: float,
    ) -> None:
        """`rows [vocab, hidden]`: the target's whole head; `frequent`: ids `[v]`, all in `known`, and their packed
        rows."""
        self._rows, self._norm, self._eps = rows, norm, eps
        self._ids, self._head = frequent
        self._known = known
        self._context_vocab: dict[int, None] = {}  # an ordered set
        self._context_head: tuple[torch.Tensor, dispatch.Linear] | None = None  # None: must be packed again

    def allow(self, tokens: Sequence[int]) -> None:
        fresh = [token for token in tokens if token not in self._known and token not in self._context_vocab]
        if fresh:
            self._context_vocab.update(dict.fromkeys(fresh))
            self._context_head = None

    def propose(self, hidden: torch.Tensor, width: int) -> list[DraftCandidates]:
        states = dispatch.rms_norm(hidden.float(), self._norm, self._eps)
        logits, ids = self._head(states), self._ids
        if self._context_vocab:
            if self._context_head is None:
                context_ids = torch.tensor(list(self._context_vocab))
                self._context_head = context_ids, dispatch.quantize_linear(self._rows[context_ids])
            context_ids, head = self._context_head
            logits, ids = torch.cat((logits, head(states)), 1), torch.cat((ids, context_ids))
        indices, logprobs = top_tokens(logits, width)
        return candidate_pairs(ids[indices], logprobs)


class StateHead:
    """The same tokens for every text: those that the drafter's own head knows."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, of: str) -> None:
        """`logits`: `[n, hidden]` -> `[n, v]`; `ids [v]`: the target's, of its columns; `of`: whose head it is."""
        self._logits, self._ids, self._of = logits, ids, of

    def allow(self, tokens: Sequence[int]) -> None:
        """Nothing to do."""

    @torch.inference_mode()
    def propose(self, hidden: torch.Tensor, width: int) -> list[DraftCandidates]:
        """Raises DrafterFailed."""
        return finite_candidates(self._logits(hidden).float(), width, self._ids, self._of)


class SharedSpan:
    """A span that threads may share: a lock serializes its calls."""

    def __init__(self, span: Span) -> None:
        self._span, self._lock = span, threading.Lock()

    def new_cache(self, max_tokens: int) -> KVCacheManager:
        return self._span.new_cache(max_tokens)

    def run(self, tokens: Sequence[int], metadata: AttentionMetadata, cache: KVCacheManager) -> torch.Tensor:
        with self._lock:
            return self._span.forward(self._span.embed(tokens), metadata, cache)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._span.embed(tokens)  # reads weights alone

    def forward(self, hidden: torch.Tensor, metadata: AttentionMetadata, cache: KVCacheManager) -> torch.Tensor:
        with self._lock:
            return self._span.forward(hidden, metadata, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._lock:
            return self._span.logits(hidden)


_SHARED: SharedDrafts[TrainedDraft] = SharedDrafts()


def open_draft(path: Path, target: ModelSource) -> TrainedDraft:
    """Load a draft; clients of one process share it. Raises ModelNotFound, CorruptModel, DrafterFailed,
    UnsupportedModel."""
    missing = f"there is no draft at {path}; make one with 'swarm-draft train'"
    return _SHARED.open(path, target.weight_hash, lambda: TrainedDraft(DraftWeights.load(path), target), missing)


def top_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, v]` fp32 -> (ids `[n, count]`, log-probabilities `[n, count]`), likeliest first.

    In two passes, as selecting from a whole vocabulary is slow: the top `count` lie in the `count` blocks of the
    largest maxima.
    """
    block = 64
    rows, vocab = logits.shape
    count = min(count, vocab)
    total = logits.logsumexp(-1, keepdim=True)
    whole = vocab // block
    if vocab % block or whole <= count:
        values, ids = logits.topk(count, -1)
        return ids, values - total
    blocks = logits.view(rows, whole, block)
    best = blocks.amax(-1).topk(count, -1).indices  # [n, count]
    gathered = blocks.gather(1, best[:, :, None].expand(-1, -1, block)).reshape(rows, -1)
    values, indices = gathered.topk(count, -1)
    return best.gather(1, indices // block) * block + indices % block, values - total


def candidate_pairs(ids: torch.Tensor, logprobs: torch.Tensor) -> list[DraftCandidates]:
    """`top_tokens`' `[n, count]` ids and log-probabilities as pairs; what has no probability is left out."""
    rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [[(token, min(0.0, p)) for token, p in zip(*row, strict=True) if p > -math.inf] for row in rows]


def finite_candidates(logits: torch.Tensor, width: int, ids: torch.Tensor, of: str) -> list[DraftCandidates]:
    """The `width` likeliest of each row of `[n, v]`; `ids [v]`: the target's, of what the columns stand for. Raises
    DrafterFailed if these are no numbers."""
    if not bool(torch.isfinite(logits).all()):
        raise DrafterFailed(f"{of} gives logits that are not finite; its file is damaged")
    indices, logprobs = top_tokens(logits, width)
    return candidate_pairs(ids[indices], logprobs)


class DraftSource(NotQuantized):
    """A ModelSource of the target's first layers and the draft's own.

    Its config has one layer more than there are, so that a span of them all is not the last one and loads neither norm
    nor head: the draft has its own.
    """

    def __init__(self, weights: DraftWeights, target: ModelSource) -> None:
        self._own, self._target = weights.tensors, target
        self._base_layers = [[str(layer)] for layer in range(weights.card.base)]
        self.name, self.path, self.weight_hash = f"draft of {target.name}", target.path, target.weight_hash
        self.config: ModelConfig = replace(target.config, num_layers=weights.card.base + weights.card.layers + 1)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({EMBEDDING, *self._own, *filter(self._is_base, self._target.names())}))

    def has(self, hf_name: str) -> bool:
        return hf_name in self.names()

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return tuple(self.tensor(hf_name).shape)

    def tensor(self, hf_name: str) -> torch.Tensor:
        if hf_name == EMBEDDING or self._is_base(hf_name):
            return self._target.tensor(hf_name)
        if hf_name not in self._own:
            raise CorruptModel(f"the draft has no tensor '{hf_name}'; train it again")
        return self._own[hf_name]

    def nbytes(self, hf_name: str) -> int:
        return self.tensor(hf_name).nbytes

    def missing_bytes(self, names: Iterable[str]) -> int:
        return self._target.missing_bytes(self._of_target(names))

    def fetch(self, names: Iterable[str], progress: FetchProgress | None = None) -> None:
        self._target.fetch(self._of_target(names), progress)

    def close(self) -> None:
        """Does nothing: the caller owns the target."""

    def _of_target(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name == EMBEDDING or self._is_base(name)]

    def _is_base(self, name: str) -> bool:
        parts = name.split(".")
        return parts[:2] == ["model", "layers"] and parts[2:3] in self._base_layers
