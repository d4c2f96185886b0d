"""The check at load: the layers of an `HfSpan` against transformers' own eager attention and masks.

Owns what is compared: of each kind of layer in the span, on its loaded weights, a prompt in two pieces with another
session between its rows, a tree of two branches, a row on a committed one, and a few rows far into the context; of
layers with a recurrent state also a longer text, and going back in it. For the check, windows and chunks shrink to a
few tokens, so that some rows lie beyond them. transformers gets other embeddings than we do, so that
a layer that looks at more than hidden states and positions is found too.

Two things are compared, row by row: what comes out of the attention, and what comes out of the layer. In a mixture of
experts some rows of the latter may differ by more, as a router may choose otherwise where two experts are as good as
equal, but not three of four. The weights are the same on both sides; where experts run on our op, transformers' side
runs them one after another with its own gating. Likewise both may differ where an indexer chooses keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from swarm.errors import UnsupportedModel
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.hf_attention import Visibility
from swarm_kernels.runtime.hf_experts import EXACT, EXPERTS
from swarm_kernels.runtime.hf_legacy_attention import COUNT_FROM_ZERO, REFERENCE
from swarm_kernels.runtime.hf_span import HfSpan

_SHRUNK = 6  # tokens of a window or chunk while checking
_PROMPT, _PIECE, _OTHER, _FAR = 14, 9, 4, 4  # rows
_TREE_PARENTS, _TREE_SLOTS, _BRANCHES = (-1, -1, 0, 2), (0, 1, 2, 3), ((0, 2, 3), (1,))
_COMMITTED = (0, 2)  # slots
_LONG, _LONG_PIECE, _BACK = 71, 40, 66  # rows of a text whose states are kept in several places; where it goes back to
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_REROUTED, _MOST_REROUTED = 2.0, 0.25  # of a row's norm, if its experts or chosen keys are others; of the rows
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")


@dataclass(slots=True)
class _Outputs:
    """Rows `[n, width]` each; of a layer, the hidden states."""

    attention: torch.Tensor
    layer: torch.Tensor


@torch.inference_mode()
def check_layers(span: HfSpan) -> None:
    """Raises UnsupportedModel, naming the layer, if a kind of layer in `span` computes something else than in
    transformers. Reads the weights of one layer of each kind a few times."""
    for layer in _one_of_each_kind(span):
        _check_near(span, layer)
        _check_far(span, layer)
        if span.has_state(layer):
            _check_long(span, layer)


def _one_of_each_kind(span: HfSpan) -> list[int]:
    seen: dict[Any, int] = {}
    for layer, visibility in zip(span.layers, span.visibility, strict=True):
        parts: list[Any] = [visibility]
        for name, module in span.layer(layer).named_modules():
            scalars = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
            scalars.pop("layer_idx", None)
            parts.append((name, type(module), tuple(sorted(scalars.items()))))
        parts += [(name, parameter.shape) for name, parameter in span.layer(layer).named_parameters()]
        seen.setdefault(tuple(parts), layer)
    return list(seen.values())


def _check_near(span: HfSpan, layer: int) -> None:
    """A prompt, another session among its rows, and a tree; beyond windows and chunks, which are a few tokens here."""
    rows = _rows(span, layer, _PROMPT + len(_TREE_SLOTS) + _OTHER + 1)
    prompt, tree = rows[:_PROMPT], rows[_PROMPT : _PROMPT + len(_TREE_SLOTS)]
    other, next_row = rows[-_OTHER - 1 : -1], rows[-1:]
    with _small_windows(span):
        visibility = list(span.visibility)
        visibility[layer - span.layers.start] = span.probe(layer, layer + 1)[0].visibility
        cache = _cache(span, 256, 2)
        cache.open(b"a", 64)
        cache.open(b"b", 64)

        def run(hidden: torch.Tensor, *requests: StepRequest) -> _Outputs:
            return _ours(span, layer, hidden, cache.schedule(requests), cache, visibility)

        first = run(prompt[:_PIECE], StepRequest(b"a", 0, _PIECE))
        second = run(
            torch.cat((other, prompt[_PIECE:])),
            StepRequest(b"b", 0, _OTHER),
            StepRequest(b"a", _PIECE, _PROMPT - _PIECE),
        )
        leaves = run(tree, StepRequest(b"a", _PROMPT, 0, _TREE_PARENTS, _TREE_SLOTS))
        after = run(next_row, StepRequest(b"a", _PROMPT, 1, commit_slots=_COMMITTED))
        expected_other = _theirs(span, layer, other, 0)
        for branch, last in (*((branch, None) for branch in _BRANCHES), (_COMMITTED, after)):
            hidden = [prompt, tree[list(branch)], *([next_row] if last else [])]
            ours = [
                torch.cat(
                    [
                        getattr(first, part),
                        getattr(second, part)[_OTHER:],
                        getattr(leaves, part)[list(branch)],
                        *([getattr(last, part)] if last else []),
                    ]
                )
                for part in ("attention", "layer")
            ]
            _compare(span, layer, _Outputs(*ours), _theirs(span, layer, torch.cat(hidden), 0))
        _compare(span, layer, _Outputs(second.attention[:_OTHER], second.layer[:_OTHER]), expected_other)


def _check_far(span: HfSpan, layer: int) -> None:
    """A few rows, whose positions begin in the middle of the context."""
    start = 0 if span.config.model_type in COUNT_FROM_ZERO else span.config.context_length // 2
    rows = _rows(span, layer, _FAR)
    cache = _cache(span, 64)
    cache.open(b"a", 32)
    metadata = cache.schedule([StepRequest(b"a", 0, _FAR)])
    metadata = replace(metadata, positions=metadata.positions + start)
    ours = _ours(span, layer, rows, metadata, cache, [Visibility()] * len(span.layers))
    _compare(span, layer, ours, _theirs(span, layer, rows, start))


def _check_long(span: HfSpan, layer: int) -> None:
    """A text whose rows are computed by chunks, and again from a row in its middle."""
    rows = _rows(span, layer, _LONG)
    cache = _cache(span, 2 * _LONG)
    cache.open(b"a", _LONG)

    def run(start: int, end: int) -> _Outputs:
        plan = cache.schedule([StepRequest(b"a", start, end - start)])
        return _ours(span, layer, rows[start:end], plan, cache, list(span.visibility))

    parts = [run(0, _LONG_PIECE), run(_LONG_PIECE, _LONG)]
    cache.rollback(b"a", _BACK)
    again, expected = run(_BACK, _LONG), _theirs(span, layer, rows, 0)
    ours = [torch.cat([getattr(part, name) for part in parts]) for name in ("attention", "layer")]
    _compare(span, layer, _Outputs(*ours), expected)
    _compare(span, layer, again, _Outputs(expected.attention[_BACK:], expected.layer[_BACK:]))


def _cache(span: HfSpan, tokens: int, sessions: int = 1) -> KVCacheManager:
    """As precise as the activations: rounding of keys and values would send rows to other experts."""
    return span.cache_for(tokens, sessions, span.compute_dtype)


def _rows(span: HfSpan, layer: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, span.config.rows.width(layer), generator=generator)
    return rows.to(device=span.device, dtype=span.dtype)


def _ours(
    span: HfSpan,
    layer: int,
    hidden: torch.Tensor,
    metadata: AttentionMetadata,
    cache: KVCacheManager,
    visibility: list[Visibility],
) -> _Outputs:
    place = layer - span.layers.start
    if cache.shares(place):  # the layer whose keys it shares, which does not run, would do it
        dispatch.commit_tree_slots(cache.k[place], cache.v[place], metadata.copy_from, metadata.copy_to)
    with _attention_outputs(span, layer) as captured:
        out = span.run_layers(hidden, metadata, cache, layer, layer + 1, tuple(visibility))
    return _Outputs(captured[0], out[:, : span.config.rows.states])


def _theirs(span: HfSpan, layer: int, hidden: torch.Tensor, start: int) -> _Outputs:
    positions = torch.arange(start, start + hidden.shape[0], device=span.device)
    with _eager(span), _attention_outputs(span, layer) as captured:
        out = span.run_eager(hidden, positions, layer, layer + 1)
    return _Outputs(captured[0], out[:, : span.config.rows.states])


def _compare(span: HfSpan, layer: int, ours: _Outputs, theirs: _Outputs) -> None:
    limit = _TOLERANCE[span.dtype]
    of_attention, rows = _distances(ours.attention, theirs.attention), _distances(ours.layer, theirs.layer)
    attention, whole = of_attention.max().item(), rows.max().item()
    chooses = span.index_dim > 0
    routed = chooses or any("expert" in name for name, _ in span.layer(layer).named_modules())
    usual = max(x.quantile(1 - _MOST_REROUTED, interpolation="lower").item() for x in (of_attention, rows))
    single = attention <= (_REROUTED if chooses else limit) and whole <= (_REROUTED if routed else limit)
    if not (usual <= limit and single):
        raise UnsupportedModel(
            f"layer {layer} of this model of type {span.config.model_type} would not compute here what it does in "
            f"transformers: its attention differs by {attention:.2g}, its output by {whole:.2g}"
        )


def _distances(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to its norm or the mean norm, whichever is larger, `[n]`."""
    norms = theirs.float().norm(dim=-1)
    distances: torch.Tensor = (ours.float() - theirs.float()).norm(dim=-1)
    return distances / torch.maximum(norms, norms.mean()).clamp_min(1e-30)


@contextmanager
def _attention_outputs(span: HfSpan, layer: int) -> Iterator[list[torch.Tensor]]:
    """What the attention module of `layer` returns while this is open, `[n, ...]` flattened to two dimensions."""
    captured: list[torch.Tensor] = []

    def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        captured.append(rows[0].flatten(1) if rows.dim() > 2 else rows)

    handle = span.attention_module(layer).register_forward_hook(hook)
    try:
        yield captured
    finally:
        handle.remove()


@contextmanager
def _eager(span: HfSpan) -> Iterator[None]:
    """transformers' own attention, masks and gating of experts within."""
    configs = span.configs()
    before = [(config._attn_implementation_internal, config._experts_implementation_internal) for config in configs]
    try:
        for config, (_, experts) in zip(configs, before, strict=True):
            config._attn_implementation_internal = REFERENCE.get(span.config.model_type, "eager")
            config._experts_implementation_internal = EXACT if experts == EXPERTS else experts
        yield
    finally:
        for config, names in zip(configs, before, strict=True):
            config._attn_implementation_internal, config._experts_implementation_internal = names


@contextmanager
def _small_windows(span: HfSpan) -> Iterator[None]:
    """Windows and chunks of `_SHRUNK` tokens within, so that few rows reach beyond them; indexers choose as
    few keys."""
    changed: list[tuple[Any, str, int]] = []
    indexers = [span.attention_module(layer).indexer for layer in span.layers if span.index_dim]
    try:
        for owner, names in [(c, _WINDOWS) for c in span.configs()] + [(i, ("index_topk",)) for i in indexers]:
            for name in names:
                size = getattr(owner, name, None)
                if isinstance(size, int) and size > _SHRUNK:
                    changed.append((owner, name, size))
                    setattr(owner, name, _SHRUNK)
        yield
    finally:
        for owner, name, size in changed:
            setattr(owner, name, size)
