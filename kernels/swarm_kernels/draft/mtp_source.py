"""The layers for multi-token prediction (MTP) within a checkpoint: which tensors they are, and one of them as a model.

Owns the layouts in use. In all of them (DeepSeek-AI 2024, §2.2) a projection makes one row of a normed embedding and a
normed state, a decoder layer of the model's own kind follows, and a norm of its own comes before the model's head:

- `model.layers.N.` behind the model's N layers, with `enorm`, `hnorm`, `eh_proj` and `shared_head` (DeepSeek-V3,
  GLM-4.5 and 5);
- `mtp.`, whose norms add 1 to their weights (Qwen3-Next, Qwen3.5);
- `model.mtp_layers.0.`, whose projection reads the state first (MiMo).

Of several such layers the first is used: each is trained to follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from swarm.errors import CorruptModel, UnsupportedModel
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.layer_kinds import FULL
from swarm_kernels.models.layers import has_tied_head
from swarm_kernels.models.source import FetchProgress, ModelSource
from swarm_kernels.ops.base.matrix import Matrix
from swarm_kernels.ops.base.stored_weights import StoredWeights
from swarm_kernels.runtime.llama_span import EMBEDDING, FINAL_NORM, HEAD

LAYERS, LAYER = 3, 1
"""Of the model that the layer is put into: neither the first, which has the embedding, nor the last."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names of tensors, `block` without the rest of its own. `embedding`, `head`: its own, "" for the model's."""

    block: str
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str
    state_first: bool = False
    norm_offset: float = 0.0  # added to the weights of its norms, and of the model's last one
    embedding: str = ""
    head: str = ""


def find_mtp(source: ModelSource) -> MtpLayout | None:
    """None where the checkpoint has no such layers. Raises UnsupportedModel for those of another layout, CorruptModel
    for tensors of wrong shapes."""
    behind, mimo = f"model.layers.{source.config.num_layers}.", "model.mtp_layers.0."
    layouts = (
        MtpLayout(
            behind,
            f"{behind}enorm.weight",
            f"{behind}hnorm.weight",
            f"{behind}eh_proj.weight",
            f"{behind}shared_head.norm.weight",
            embedding=f"{behind}embed_tokens.weight",
            head=f"{behind}shared_head.head.weight",
        ),
        MtpLayout(
            "mtp.layers.0.",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.fc.weight",
            "mtp.norm.weight",
            norm_offset=1.0,
        ),
        MtpLayout(
            mimo,
            f"{mimo}token_layernorm.weight",
            f"{mimo}hidden_layernorm.weight",
            f"{mimo}input_proj.weight",
            f"{mimo}final_layernorm.weight",
            state_first=True,
        ),
    )
    layout = next((layout for layout in layouts if source.has(layout.projection)), None)
    if layout is None:
        if any(name.startswith(("mtp.", "model.mtp", behind)) for name in source.names()):
            raise UnsupportedModel(f"the MTP layers of {source.name} are of a layout that is not run here")
        return None
    _check_shapes(source, layout)
    embedding, head = (name if source.has(name) else "" for name in (layout.embedding, layout.head))
    return replace(layout, embedding=embedding, head=head)


def _check_shapes(source: ModelSource, layout: MtpLayout) -> None:
    hidden, vocab = source.config.hidden_size, source.config.vocab_size
    expected: dict[str, tuple[int, ...]] = {
        layout.embedding_norm: (hidden,),
        layout.state_norm: (hidden,),
        layout.projection: (hidden, 2 * hidden),
        layout.norm: (hidden,),
        FINAL_NORM: (hidden,),
    }
    expected |= {name: (vocab, hidden) for name in (layout.embedding, layout.head) if name and source.has(name)}
    for name, shape in expected.items():
        found = tuple(source.shape(name)) if source.has(name) else None
        if found != shape:
            raise CorruptModel(f"{source.name}: {name} has shape {found or 'none'}, its MTP layer needs {shape}")


def tensors_of(source: ModelSource, layout: MtpLayout) -> list[str]:
    """All that a drafter of it reads, the model's embedding and head among them."""
    ends = (layout.embedding or EMBEDDING, layout.head or (EMBEDDING if has_tied_head(source) else HEAD), FINAL_NORM)
    own = (layout.embedding_norm, layout.state_norm, layout.projection, layout.norm)
    return sorted({*ends, *own, *(name for name in source.names() if name.startswith(layout.block))})


class MtpBlock:
    """A ModelSource of a model of three layers, whose middle one is the MTP layer's decoder layer; the others have no
    tensors. See `ModelSource`."""

    def __init__(self, target: ModelSource, layout: MtpLayout) -> None:
        """Raises CorruptModel, UnsupportedModel."""
        self._target = target
        outside = {layout.embedding_norm, layout.state_norm, layout.projection, layout.norm}
        inside = [name for name in target.names() if name.startswith(layout.block) and name not in outside]
        inside = [name for name in inside if name not in (layout.embedding, layout.head)]
        prefix = f"model.layers.{LAYER}."
        self._stored = {prefix + name.removeprefix(layout.block): name for name in inside} | {FINAL_NORM: FINAL_NORM}
        mixture = any(name.startswith((f"{layout.block}mlp.experts", f"{layout.block}mlp.gate.")) for name in inside)
        self.config: ModelConfig = model_config(_three_layers(target.config, mixture=mixture), where=target.name)
        self.name, self.path, self.weight_hash = f"MTP layer of {target.name}", target.path, target.weight_hash

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._stored))

    def has(self, hf_name: str) -> bool:
        return hf_name in self._stored

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._target.shape(self._name(hf_name))

    def tensor(self, hf_name: str) -> torch.Tensor:
        return self._target.tensor(self._name(hf_name))

    def sliced(self, hf_name: str) -> Matrix:
        return self._target.sliced(self._name(hf_name))

    def nbytes(self, hf_name: str) -> int:
        return self._target.nbytes(self._name(hf_name))

    def native(self, hf_name: str) -> torch.dtype:
        return self._target.native(self._name(hf_name))

    def as_stored(self, hf_name: str, expert: int | None = None) -> StoredWeights | None:
        return self._target.as_stored(self._name(hf_name), expert)

    def missing_bytes(self, names: Iterable[str]) -> int:
        return self._target.missing_bytes([self._name(name) for name in names])

    def fetch(self, names: Iterable[str], progress: FetchProgress | None = None) -> None:
        self._target.fetch([self._name(name) for name in names], progress)

    def close(self) -> None:
        """Does nothing: the caller owns the target."""

    def _name(self, hf_name: str) -> str:
        if hf_name not in self._stored:
            raise CorruptModel(f"{self.name} has no tensor '{hf_name}'; fetch the model again")
        return self._stored[hf_name]


def _three_layers(config: ModelConfig, *, mixture: bool) -> Mapping[str, Any]:
    """The target's config for a model whose layers are all of the MTP layer's kind: full attention, and a mixture of
    experts or not."""
    hf = dict(config.hf)
    for key, value in hf.items():
        if isinstance(value, list) and len(value) == config.num_layers:
            hf[key] = [value[-1]] * LAYERS
    kinds = config.hf.get("layer_types")
    if (isinstance(kinds, list) and FULL in kinds) or (kinds is None and "full_attention_interval" in hf):
        hf["layer_types"] = [FULL] * LAYERS  # also of models most of whose layers have a recurrent state
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if key in hf:
            hf[key] = LAYERS
    if "first_k_dense_replace" in hf or (mixture and config.model_type.startswith(("deepseek", "glm"))):
        hf["first_k_dense_replace"] = 0 if mixture else LAYERS
    if "mlp_only_layers" in hf or not mixture:
        hf["mlp_only_layers"] = [] if mixture else list(range(LAYERS))
    return hf
