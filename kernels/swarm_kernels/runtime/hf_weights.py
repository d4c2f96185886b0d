"""A transformers model on the meta device, and loading the weights of some of its layers into it.

Owns the mapping of tensors to parameters, transformers' renamings and fusions (mixtures of experts) included.
`hf_span` runs the layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from swarm.errors import CorruptModel, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.hf_config import check_fields
from swarm_kernels.models.layers import is_beyond
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.hf_attention import INDEXED
from swarm_kernels.runtime.hf_conversions import layer_of
from swarm_kernels.runtime.hf_legacy_attention import LEGACY, adapt
from swarm_kernels.runtime.hf_linears import Format
from swarm_kernels.runtime.hf_packing import Packer
from swarm_kernels.runtime.span import Progress

PLAIN_KINDS = frozenset({"mlp", "moe"})
"""Layers whose rows see no others."""

STATE_KINDS = frozenset({"linear_attention", "conv"})
"""Layers with a recurrent state, if `hf_states` knows their modules."""

_LAYER_KINDS = PLAIN_KINDS | STATE_KINDS | {"full_attention", "sliding_attention", "chunked_attention", INDEXED}


@dataclass(slots=True)
class MetaModel:
    """A transformers model, all on the meta device until `load_weights`."""

    causal_lm: Any  # PreTrainedModel: hidden states -> logits
    decoder: Any  # without the head
    layers: torch.nn.ModuleList
    embedding: torch.nn.Module


def meta_model(config: ModelConfig, attention: str, dtype: torch.dtype, experts: str | None = None) -> MetaModel:
    """Build the model a config describes, without weights and with `attention` as its attention, `experts` as its
    mixtures of experts.

    Raises UnsupportedModel if transformers has no such decoder, or its layers are neither full nor sliding-window
    attention."""
    kind = config.model_type
    try:
        hf = AutoConfig.for_model(**{**config.hf, "model_type": kind})
        check_fields(config.hf, _fields(hf), "config.json")
        _check_layer_kinds(kind, hf, wide=not config.rows.is_plain)
        with torch.device("meta"):
            legacy = kind in LEGACY  # their classes look the attention up among their own
            model = AutoModelForCausalLM.from_config(
                hf,
                dtype=dtype,
                attn_implementation="eager" if legacy else attention,
                experts_implementation=experts,
                trust_remote_code=False,
            ).eval()
        if legacy:
            hf = model.config
            hf._attn_implementation_internal = attention
            adapt(model, hf)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if reason == repr(attention):  # it looks its attention up among its own
            reason = "its attention does not go through transformers' attention interface"
        raise UnsupportedModel(f"transformers cannot build a decoder of type {kind}: {reason}") from None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    layers = next(
        (m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == config.num_layers), None
    )
    if layers is None:
        raise UnsupportedModel(f"models of type {kind} have no plain list of {config.num_layers} layers")
    return MetaModel(model.requires_grad_(False), decoder, layers, model.get_input_embeddings())


def _fields(hf: Any) -> set[str]:
    """What a config class reads: its fields and their other names."""
    return {field.name for field in dataclasses.fields(hf)} | set(getattr(hf, "attribute_map", None) or {})


def _check_layer_kinds(kind: str, hf: Any, *, wide: bool) -> None:
    others = sorted(set(getattr(hf, "layer_types", None) or ()) - _LAYER_KINDS)
    if others:
        raise UnsupportedModel(f"models of type {kind} have layers of kind {', '.join(others)}, which swarm cannot run")
    if getattr(hf, "hidden_size_per_layer_input", 0) and not wide:
        raise UnsupportedModel(
            f"models of type {kind} embed every token once more in each layer (hidden_size_per_layer_input), "
            "which a node without the tokens cannot do"
        )
    both_ways = getattr(hf, "use_bidirectional_attention", False)
    if both_ways not in (None, False, "vision") or getattr(hf, "is_encoder_decoder", False):
        raise UnsupportedModel(f"this model of type {kind} is not causal; only causal decoders are served")


def load_weights(
    model: MetaModel, source: ModelSource, layers: LayerSpan, device: torch.device, progress: Progress, form: Format
) -> None:
    """Fill the parameters of `layers`, of modules outside all layers, and of the embedding and head if the span has
    them; linear layers, embedding and head are replaced by packed ones where `form` has these.

    Everything else stays on the meta device and takes no memory. Raises CorruptModel, UnsupportedModel.
    """
    _fill_buffers(model.causal_lm, device)
    loader = _WeightLoader(model.causal_lm, source, device)
    packer = Packer(model.causal_lm, source, device, form)
    outside = _outside_names(model, layers)
    packed = packer.pack_edges(model.embedding, layers.start == 0, layers.end == len(model.layers))
    loader.fill(outside - packed.parameters, None, packed.stored)
    model.embedding = model.causal_lm.get_input_embeddings()
    progress(1 / (len(layers) + 1))
    list_name = next(name for name, module in model.causal_lm.named_modules() if module is model.layers)
    for done, index in enumerate(layers, start=2):
        prefix = f"{list_name}.{index}"
        packed = packer.pack_layer(prefix, index)
        names = {name for name in loader.parameters if name.startswith(f"{prefix}.")}
        loader.fill(names - packed.parameters, index, packed.stored)
        packer.pack_filled(prefix)
        progress(done / (len(layers) + 1))


def _outside_names(model: MetaModel, layers: LayerSpan) -> set[str]:
    """Names outside all layers, less the embedding or head that this span does not need. Tied weights count as both."""
    inside = {id(p) for p in model.layers.state_dict(keep_vars=True).values()}
    embedding = {id(p) for p in model.embedding.parameters()}
    head_module = model.causal_lm.get_output_embeddings()
    head = {id(p) for p in head_module.parameters()} if head_module is not None else set()
    needed = (embedding if layers.start == 0 else set()) | (head if layers.end == len(model.layers) else set())
    excluded = inside | ((embedding | head) - needed)
    everything = model.causal_lm.state_dict(keep_vars=True)
    return {name for name, p in everything.items() if id(p) not in excluded}


@torch.no_grad()
def _fill_buffers(causal_lm: Any, device: torch.device) -> None:
    """Initialize buffers that are computed, not stored (rotary frequencies, embedding scales), as transformers does: by
    the innermost model around each."""
    models = [module for module in causal_lm.modules() if hasattr(module, "_init_weights")]
    initialize = {id(module): model._init_weights for model in models for module in model.modules()}
    for module in causal_lm.modules():
        meta = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.device.type == "meta"}
        for name, buffer in meta.items():
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        if meta:
            initialize[id(module)](module)


class _WeightLoader:
    """Copies tensors of a source into a model, by name or by transformers' conversions."""

    def __init__(self, causal_lm: Any, source: ModelSource, device: torch.device) -> None:
        self._model = causal_lm
        self._source = source
        self._device = device
        self.parameters: dict[str, torch.Tensor] = dict(causal_lm.state_dict(keep_vars=True))

    def fill(self, names: Collection[str], layer: int | None, done: Collection[str] = ()) -> None:
        """`names`: parameters and buffers, all of one layer or of none. `done`: stored tensors that were used."""
        missing: list[list[str]] = []
        for tied in self._tied(names):
            stored = next((name for name in tied if self._source.has(name)), None)
            if stored is None:
                if isinstance(self.parameters[tied[0]], torch.nn.Parameter):  # buffers have their value already
                    missing.append(tied)
                continue
            tensor = self._source.tensor(stored)
            meta = self.parameters[tied[0]]
            if tensor.shape != meta.shape:
                raise CorruptModel(
                    f"tensor {stored} has shape {tuple(tensor.shape)}, its config needs {tuple(meta.shape)}"
                )
            tensor = tensor.to(device=self._device, dtype=meta.dtype)
            for name in tied:
                self._assign(name, tensor)
        if missing:
            self._convert(layer, done)
            self._check_filled(missing)

    def _tied(self, names: Collection[str]) -> Iterable[list[str]]:
        """Names grouped by parameter: tied weights have several."""
        groups: dict[int, list[str]] = {}
        for name in sorted(names):
            groups.setdefault(id(self.parameters[name]), []).append(name)
        return groups.values()

    def _assign(self, name: str, tensor: torch.Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        if isinstance(self.parameters[name], torch.nn.Parameter):
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor

    def _convert(self, layer: int | None, done: Collection[str]) -> None:
        """Let transformers rename and fuse those tensors of `layer` that have no parameter of their own name."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import convert_and_load_state_dict_in_model
            from transformers.modeling_utils import LoadStateDictConfig
        except ImportError:
            raise UnsupportedModel("this version of transformers cannot convert the model's weights") from None
        num_layers = self._source.config.num_layers
        unmatched = [
            name
            for name in self._source.names()
            if name not in self.parameters
            and layer_of(name) == layer
            and name not in done
            and not is_beyond(name, num_layers)
        ]
        bar_enabled = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            convert_and_load_state_dict_in_model(
                self._model,
                {name: _LazyTensor(self._source, name) for name in unmatched},
                LoadStateDictConfig(
                    weight_mapping=get_model_conversion_mapping(self._model),
                    device_map={"": self._device},
                    dtype=self._model.dtype,
                ),
            )
        finally:
            if bar_enabled:
                transformers_logging.enable_progress_bar()

    def _check_filled(self, missing: Iterable[list[str]]) -> None:
        for names in missing:
            found = [p for p in map(self._model.get_parameter, names) if p.device.type != "meta"]
            if not found:
                raise CorruptModel(f"the model's files hold no tensor for {names[0]}")
            for name in names:
                self._assign(name, found[0].data)


@dataclass(frozen=True, slots=True)
class _LazyTensor:
    """A tensor that is read when transformers first slices it."""

    source: ModelSource
    name: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.source.tensor(self.name)[index]
        return tensor
