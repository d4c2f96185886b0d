"""Which tensors of a model belong to which of its layers, told from their names.

Owns the patterns of the names, of Hugging Face's models. What a tensor is for is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from swarm.types import LayerSpan
from swarm_kernels.models.config import ModelConfig

HEAD = "lm_head.weight"
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})\.")
_EXPERTS = re.compile(r"\.experts\.(?:(\d{1,6})\.)?|\.block_sparse_moe\.(?:input|output)_linear\.")
_MTP = re.compile(r"(?:^|\.)mtp(?:_layers)?\.")
_TEXT_PART = "model.language_model."
_PER_LAYER_TABLE = "embed_tokens_per_layer"
_INPUT = re.compile(
    r"embed_tokens|embed_in|wte|wpe|embeddings?\.|(?:^|\.)(?:per_layer_(?:model_)?projection(?:_norm)?|altup_projections)\."
)
_FINAL = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output|score)\.")


class HasTensors(Protocol):
    """The part of a ModelSource that is looked at here."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> tuple[str, ...]: ...

    def has(self, hf_name: str) -> bool: ...


def layer_of(name: str, num_layers: int) -> int | None:
    """The layer of a tensor; None outside all layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match and int(match[1]) < num_layers and not _MTP.search(name) else None


def is_beyond(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to layers behind the model's own, for multi-token prediction: drafters read these
    (`draft.mtp_source`), and no node does."""
    match = _LAYER.search(name)
    return _MTP.search(name) is not None or (match is not None and int(match[1]) >= num_layers)


def is_embedding(name: str) -> bool:
    """Whether a tensor outside all layers is part of the input embedding."""
    return bool(_INPUT.search(name))


def in_text_part(name: str) -> str | None:
    """The name that a tensor of a multimodal model has in its text decoder alone; None for one of another part."""
    if name.startswith(_TEXT_PART):
        return f"model.{name.removeprefix(_TEXT_PART)}"
    return name if name == HEAD else None


def is_looked_up(name: str) -> bool:
    """Whether single rows of a tensor are read from the files while the model runs, and none is kept in memory: of
    per-layer embeddings."""
    return _PER_LAYER_TABLE in name


def has_tied_head(source: HasTensors) -> bool:
    """Whether the head's weights are the embedding's. Some files hold an unused copy."""
    return source.config.tie_word_embeddings or not source.has(HEAD)


def is_of_experts(name: str) -> bool:
    """Whether a tensor is part of an expert that rows are routed to, or holds such parts of all experts of a layer."""
    return _EXPERTS.search(name) is not None


def holds_experts(name: str, experts: range) -> bool:
    """Whether a tensor `is_of_experts` and has some of these in it."""
    match = _EXPERTS.search(name)
    return match is not None and (match[1] is None or int(match[1]) in experts) and len(experts) > 0


def tensors_of_experts(source: HasTensors, layers: LayerSpan, experts: range) -> Iterable[str]:
    """The tensors that some experts of these layers are read from."""
    for name in source.names():
        if layer_of(name, source.config.num_layers) in layers and holds_experts(name, experts):
            yield name


def tensors_of_span(source: HasTensors, layers: LayerSpan, experts: range | None = None) -> Iterable[str]:
    """The tensors that a span of these layers reads. `experts`: of each mixture; None: all."""
    config = source.config
    first, last, tied = layers.start == 0, layers.end == config.num_layers, has_tied_head(source)
    for name in source.names():
        layer = layer_of(name, config.num_layers)
        if is_beyond(name, config.num_layers):
            needed = False
        elif layer is not None:
            needed = layer in layers and (experts is None or not is_of_experts(name) or holds_experts(name, experts))
        elif name == HEAD and tied:
            needed = False
        elif is_looked_up(name):
            needed = first
        elif is_embedding(name):
            needed = first or (last and tied)
        else:  # transformers' layers, on which a mixture runs on a GPU, read all norms; ours those of their own end
            ours = config.has_fast_path and not config.is_mixture
            needed = last or not (ours or _FINAL.search(name))
        if needed:
            yield name
