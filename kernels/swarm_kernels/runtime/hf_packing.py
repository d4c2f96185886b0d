"""Replaces the linear layers, experts, embedding and head of a transformers model by packed ones as they are read.

Owns the order: each matrix is read as the files have it, packed, and its copy dropped before the next is read, so no
layer is ever held twice. `hf_linears` owns the modules, `weight_reader` the formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops.base import int8_linear
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.runtime.hf_conversions import StoredParameter, layer_of, stored_parameters
from swarm_kernels.runtime.hf_expert_reader import ExpertReader
from swarm_kernels.runtime.hf_experts import adopt_llama4, attach, is_experts
from swarm_kernels.runtime.hf_linears import (
    Format,
    PackedEmbedding,
    PackedModule,
    linears_of,
    replace_module,
    weight_bytes,
)
from swarm_kernels.runtime.weight_reader import Packs, WeightReader

_MOST_UNPACKED = 0.25  # of a layer's bytes


@dataclass(slots=True)
class Packed:
    """What was packed: names of transformers' parameters, and of the stored tensors."""

    parameters: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)


class Packer:
    """Of one model. Does nothing where its format has no packed weights."""

    def __init__(self, causal_lm: Any, source: ModelSource, device: torch.device, form: Format) -> None:
        self._model = causal_lm
        self._source = source
        self._form = form
        stored = None if form.is_quantized else form.compute  # they are quantized from what the files have
        self._reader = WeightReader(source, stored, device)

    def pack_edges(self, embedding: torch.nn.Module, first: bool, last: bool) -> Packed:
        """The embedding and the head, if the span has the model's first and last layer; in quantized spans in 8 bits:
        rounding of the head costs the most quality. They are one where they are tied. An embedding of its own stays
        transformers' in bf16."""
        packed, packs = Packed(), self._form.packs
        head = self._model.get_output_embeddings()
        if packs is None or not isinstance(embedding, torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
            return packed
        names = {id(module): name for name, module in self._model.named_modules()}
        stored = stored_parameters(self._model, [name for name in self._source.names() if layer_of(name) is None])
        of_embedding, of_head = f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"
        tied = head.weight is embedding.weight
        if tied:
            if last or self._form.is_quantized:
                packed.parameters |= {of_embedding, of_head}
            stored[of_head] = stored[of_embedding] = stored.get(of_embedding) or stored.get(of_head, StoredParameter())
        linear: Linear | None = None
        if last:
            linear = self._matrix(_sole(stored, of_head), head, Packs(packs.plain))
            packed.parameters |= {of_head, of_head.removesuffix("weight") + "bias"}
            replace_module(self._model, names[id(head)], PackedModule(linear))
        if first and (self._form.is_quantized or (tied and last)):
            if not tied or linear is None:
                matrix = self._reader.matrix(_sole(stored, of_embedding), *embedding.weight.shape)
                linear = int8_linear.quantize_linear(matrix, None)
            packed.parameters.add(of_embedding)
            embedding.padding_idx = None  # of use in training only, and may exceed the rows that are looked up
            replace = PackedEmbedding(embedding, linear, self._form.compute, tied and last)
            replace_module(self._model, names[id(embedding)], replace)
        used = packed.parameters & stored.keys()
        packed.stored = {name for parameter in used for name in stored[parameter].names}
        return packed

    def pack_layer(self, prefix: str, layer: int) -> Packed:
        """What is stored as it is used, but for its name, and experts. Raises CorruptModel, UnsupportedModel."""
        packed = Packed()
        stored = stored_parameters(self._model, [name for name in self._source.names() if layer_of(name) == layer])
        if self._form.packs is not None:
            for name, module in list(linears_of(self._model, prefix)):
                found = stored.get(f"{name}.weight")
                if found is not None and found.sole is not None:
                    replace_module(self._model, name, PackedModule(self._matrix(found.sole, module, self._form.packs)))
                    packed.parameters |= {f"{name}.weight", f"{name}.bias"}
                    packed.stored |= {found.sole, _bias(found.sole)}
        if self._form.expert_packs is not None:
            adopt_llama4(self._model.get_submodule(prefix), self._model.config.get_text_config())
            for name, module in self._model.get_submodule(prefix).named_modules():
                if is_experts(module):
                    reader = ExpertReader(self._reader, stored, f"{prefix}.{name}", module, self._form.expert_packs)
                    attach(module, *reader.read())
                    packed.parameters |= reader.parameters
                    packed.stored |= {
                        part for each in reader.parameters if each in stored for part in stored[each].names
                    }
        return packed

    def pack_filled(self, prefix: str) -> None:
        """Linear layers whose weights transformers had to convert, once it has. Raises UnsupportedModel if most of the
        layer is neither linear layers nor experts."""
        packs = self._form.packs
        if packs is None:
            return
        pack = packs.plain if packs.four_bits is None else packs.four_bits.rounded
        for name, module in list(linears_of(self._model, prefix)):
            weight = module.weight.T.contiguous() if isinstance(module, Conv1D) else module.weight
            replace_module(self._model, name, PackedModule(pack(weight, module.bias)))  # type: ignore[arg-type]
        if not self._form.is_quantized:
            return
        layer = self._model.get_submodule(prefix)
        plain = sum(p.nbytes for p in layer.parameters() if p.dim() > 1 and p.device.type != "meta")
        if plain > _MOST_UNPACKED * weight_bytes(layer):
            raise UnsupportedModel(
                f"models of type {self._model.config.model_type} are not served in 8 or 4 bits, because most of their "
                "weights are in no linear layers; use bf16"
            )

    def _matrix(self, stored: str, module: Any, packs: Packs) -> Linear:
        bias = module.bias is not None
        if not isinstance(module, Conv1D):
            return self._reader.linear([stored], [module.out_features], module.in_features, bias, packs)
        weight = self._reader.matrix(stored, module.nx, module.nf)[:].T.contiguous()
        pack = self._reader.pack_of(packs, [stored])
        return pack(weight, self._reader.vector(_bias(stored), module.nf) if bias else None)


def _sole(stored: dict[str, StoredParameter], name: str) -> str:
    found = stored.get(name)
    if found is None or found.sole is None:
        raise CorruptModel(f"the model's files hold no tensor for {name}")
    return found.sole


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
