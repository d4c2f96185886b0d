"""transformers' attention interface on our paged attention: which keys a layer's rows see, and the call itself.

Owns the masks. transformers says by its mask functions, not by the arguments of the attention call, what the eager and
sdpa implementations mask; so that is where a layer's `Visibility` comes from. It is found once, while a span is
probed: our mask function hands the layers a `_ProbedMask`, which comes back in the attention call. Once batches run,
the mask is None. `hf_span` runs the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from swarm.errors import UnsupportedModel
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.torch_reference import first_visible
from swarm_kernels.runtime.hf_latent import AbsorbedWeights, absorbed_weights

ATTENTION = "swarm"
"""Our name in transformers' attention interface."""

_IGNORED = frozenset({
    "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "position_embeddings", "return_dict", "logits_to_keep", "sliding_window", "indices",
})  # fmt: skip
"""Arguments of the interface that AttentionMetadata or the mask implies; any other that is set would change the
result."""

_UNKNOWN_MASK = "its attention mask is neither causal, a sliding window nor chunks"
INDEXED = "indexed_attention"
"""Layers that attend to the `index_topk` keys that an indexer chooses (`hf_indexer`)."""

_SAMPLES = 64
_PROBED_CONTEXT = 1 << 17  # positions at which a mask is looked at, at most: windows and chunks are smaller


@dataclass(frozen=True, slots=True)
class Visibility:
    """The committed and tree keys a row at position p sees, its own included.

    At most one is given: `window`: those at distance < window; `chunk`: those of p's chunk, p // chunk."""

    window: int | None = None
    chunk: int | None = None

    def oldest(self, position: int) -> int:
        """The first position that a row sees."""
        first = first_visible(torch.tensor(position), self.window, self.chunk)
        return 0 if first is None else max(0, int(first))


@dataclass(slots=True)
class ProbedLayer:
    """What one attention call of a probe showed."""

    layer: int  # of the span
    heads: int  # 0: it has no keys and values
    kv_heads: int
    head_dim: int
    visibility: Visibility
    module: torch.nn.Module
    latent: bool = False  # keys hold the values: none are cached


@dataclass(slots=True)
class ChosenKeys:
    """What the indexer of a layer chose for the rows of a batch, see `hf_indexer`."""

    keys: torch.Tensor  # [n, size], the rows' own index keys
    committed: torch.Tensor | None  # [n, words], bits of the committed keys; None: all
    metadata: AttentionMetadata  # its tree mask has the tree slots that were chosen


@dataclass(slots=True)
class BatchContext:
    """Context of the attention calls while a batch runs."""

    metadata: AttentionMetadata
    first_layer: int
    cache: KVCacheManager | None = None  # None while probing: record shapes, compute nothing
    visibility: tuple[Visibility, ...] = ()  # by layer of the span
    shared: AttentionMetadata | None = None  # of layers that share an earlier one's blocks, where slots are moved
    indexer_mask: torch.Tensor | None = None  # what transformers' layers hand to their indexers
    chosen_keys: ChosenKeys | None = None  # of the layer that runs, if its indexer chooses
    context: int = _PROBED_CONTEXT  # while probing: the model's context length
    probed: list[ProbedLayer] = field(default_factory=list)


_running: ContextVar[BatchContext] = ContextVar("swarm_running")


def running_batch() -> BatchContext | None:
    """Of the attention calls that run in this context."""
    return _running.get(None)


@contextmanager
def running_as(batch: BatchContext) -> Iterator[None]:
    """Attention calls within belong to `batch`."""
    token = _running.set(batch)
    try:
        yield
    finally:
        _running.reset(token)


def running() -> BatchContext | None:
    """The context of the calls within `running_as`, None outside."""
    return _running.get(None)


@dataclass(frozen=True, slots=True)
class _ProbedMask:
    """Stands for a mask that is not simply causal, on its way through transformers' layers."""

    visibility: Visibility | None
    reason: str = ""  # why there is no visibility; models also make masks that none of their layers uses


def _mask(
    *, mask_function: Callable[..., Any], config: Any, q_length: int, dtype: torch.dtype, device: Any, **_: Any
) -> _ProbedMask | torch.Tensor | None:
    """transformers' mask interface."""
    batch = _running.get(None)
    if batch is not None and INDEXED in (getattr(config, "layer_types", None) or ()):
        batch.indexer_mask = torch.zeros(1, 1, q_length, q_length, dtype=dtype, device=device)
        return batch.indexer_mask
    if getattr(config, "model_type", "") == "mpt":  # casts it, without looking at it
        return torch.zeros(1, 1, 1, 1, device=device)
    if batch is None or batch.cache is not None:
        return None
    try:
        visibility = visibility_of(mask_function, batch.context)
    except UnsupportedModel as error:
        return _ProbedMask(None, str(error))
    return None if visibility == Visibility() else _ProbedMask(visibility)


def visibility_of(mask_function: Callable[..., Any], context: int) -> Visibility:
    """A mask function of transformers, by what it answers at many positions below `context`. Raises UnsupportedModel
    unless it is causal, causal with a window, or causal within chunks."""
    last = max(min(context, _PROBED_CONTEXT) - 1, 3)
    oldest = _oldest_seen(mask_function, last)
    found = Visibility()
    if oldest > 0:
        of_previous = _oldest_seen(mask_function, last - 1)
        is_window = of_previous == last - 1 if oldest == last else of_previous < oldest
        before = _oldest_seen(mask_function, oldest - 1)
        found = Visibility(window=last - oldest + 1) if is_window else Visibility(chunk=oldest - before)
    samples = {*range(0, last, max(last // _SAMPLES, 1)), oldest, last - oldest, last - 1, last}
    for position in sorted(samples):
        if _oldest_seen(mask_function, position) != found.oldest(position):
            raise UnsupportedModel(_UNKNOWN_MASK)
    return found


def _oldest_seen(mask_function: Callable[..., Any], position: int) -> int:
    """The first key that a row at `position` sees. Raises UnsupportedModel unless it sees all from there up to itself,
    and none after itself."""
    keys = torch.arange(position + 3)
    zero = torch.zeros_like(keys)
    try:
        seen = torch.as_tensor(mask_function(zero, zero, zero + position, keys)).expand(position + 3).bool()
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise UnsupportedModel(f"its attention mask cannot be read: {type(error).__name__}") from None
    count = int(seen.sum())
    if not count or not seen[position + 1 - count : position + 1].all():
        raise UnsupportedModel(_UNKNOWN_MASK)
    return position + 1 - count


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _ProbedMask | torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query [1, H, n, D]`, `key`, `value` `[1, G, n, D]` -> `[1, n, H, D]`.

    `s_aux [H]`: sinks, one more score per head with no value (gpt-oss)."""
    unknown = [name for name, given in others.items() if name not in _IGNORED and given is not None]
    batch = _running.get()
    if isinstance(attention_mask, torch.Tensor) and attention_mask is not batch.indexer_mask:
        unknown.append("an attention mask of its own")
    if unknown:
        raise UnsupportedModel(f"its attention needs {', '.join(unknown)}")
    weights = absorbed_weights(module)
    if weights is not None:
        return _latent_attention(module, weights, query[0], key, batch, attention_mask, scaling, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if value_dim < key_dim:  # smaller values than keys (multi-head latent attention): the cache holds both at one size
        v = torch.nn.functional.pad(v, (0, key_dim - value_dim))
    layer = int(module.layer_idx) - batch.first_layer  # type: ignore[arg-type]
    scale = key_dim**-0.5 if scaling is None else float(scaling)
    if batch.cache is None:
        visibility = _probed_visibility(attention_mask)
        batch.probed.append(ProbedLayer(layer, q.shape[1], k.shape[1], key_dim, visibility, module))
        return q[None, ..., :value_dim], None
    q, k, v = _in_shape_of(batch.cache, q, k, v)
    attended = _attend(q, k, v, batch, layer, scale, softcap, s_aux)
    return attended[None, ..., :value_dim], None


def attend_as_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visibility: Visibility = Visibility(),
) -> torch.Tensor:
    """Attention of a module that does not call transformers' interface: shapes as `_attention`'s."""
    mask = None if visibility == Visibility() else _ProbedMask(visibility)
    return _attention(module, query, key, value, mask, scale)[0]


def row_positions(rows: int, device: torch.device) -> torch.Tensor:
    """Of the rows of the running batch, `[rows]` int64; zeros while probing."""
    batch = _running.get()
    return batch.metadata.positions if batch.cache is not None else torch.zeros(rows, dtype=torch.int64, device=device)


def _probed_visibility(attention_mask: _ProbedMask | torch.Tensor | None) -> Visibility:
    if not isinstance(attention_mask, _ProbedMask):
        return Visibility()
    if attention_mask.visibility is None:
        raise UnsupportedModel(attention_mask.reason)
    return attention_mask.visibility


def _latent_attention(
    module: torch.nn.Module,
    weights: AbsorbedWeights,
    query: torch.Tensor,
    key: torch.Tensor,
    batch: BatchContext,
    attention_mask: _ProbedMask | torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """`query [H, n, nope + rope]`, `key [1, 1, n, key_dim]` of `AbsorbedWeights` -> `[1, n, H, v_head_dim]`."""
    heads, rows, query_dim = query.shape
    layer = int(module.layer_idx) - batch.first_layer  # type: ignore[arg-type]
    if batch.cache is None:
        visibility = _probed_visibility(attention_mask)
        if visibility != Visibility() or sinks is not None:
            raise UnsupportedModel("its latent attention has windows, chunks or sinks")
        batch.probed.append(ProbedLayer(layer, heads, 1, weights.key_dim, visibility, module, latent=True))
        return query.new_zeros(1, rows, heads, weights.head_dim), None
    latents = key[0].transpose(0, 1)
    chosen = batch.chosen_keys or ChosenKeys(latents[:, 0, :0], None, batch.metadata)
    attended = dispatch.attend_latent(
        weights.queries(query),
        latents,
        chosen.keys[:, None],
        batch.cache.k[layer],
        batch.cache.v[layer],
        chosen.metadata,
        query_dim**-0.5 if scaling is None else float(scaling),
        weights.value_dim,
        softcap,
        chosen.committed,
    )
    return weights.outputs(attended, query.dtype)[None], None


def _in_shape_of(
    cache: KVCacheManager, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layers may differ in their key heads and head sizes; the cache has room for the most and the largest. Heads are
    repeated within their group of query heads, dimensions padded with zeros: neither changes the result."""
    heads, dim = cache.shape.kv_heads, cache.shape.head_dim
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    if q.shape[-1] != dim:
        q, k, v = (torch.nn.functional.pad(x, (0, dim - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: BatchContext,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    cache, visibility = batch.cache, batch.visibility[layer]
    assert cache is not None
    k_blocks, v_blocks = cache.k[layer], cache.v[layer]
    metadata = batch.shared if batch.shared is not None and cache.shares(layer) else batch.metadata
    return dispatch.attend(
        q, k, v, k_blocks, v_blocks, metadata, scale, visibility.window, softcap, visibility.chunk, sinks
    )


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
