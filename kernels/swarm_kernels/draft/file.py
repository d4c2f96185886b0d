"""The file format of a trained drafter: a draft's layers and final norm, or Medusa heads for the tail.

Owns the format: one safetensors file of a few MB. The target's embedding, its first layers and the rows of its head are
not in it: they are read from the target's own weights, whose fingerprint is in the file. Matrices are int8 with a scale
per row, or bf16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm.errors import CorruptModel, ModelNotFound
from swarm_kernels.models.source import ModelSource

FINAL_NORM = "model.norm.weight"
_VOCABULARY = "draft.vocabulary"
_SCALE = ".scale"
_FORMAT = "swarm-draft-1"


@dataclass(frozen=True, slots=True)
class DraftMetadata:
    """What the file holds and how well it did when it was made. `evaluation`: metrics by name, on held-out chats."""

    model: str
    weight_hash: str  # of the target
    base: int  # first layers of the target that it uses unchanged
    layers: int  # own layers after those
    heads: int = 0  # own Medusa heads after those
    trained_tokens: int = 0
    seen_tokens: int = 0  # with repetition
    date: str = ""
    evaluation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class DraftWeights:
    """`tensors`: fp32; layers by Hugging Face's names, numbered from `card.base`, heads by Medusa's (`draft.medusa`).
    `vocabulary [v]`: the ids they can predict, ascending."""

    card: DraftMetadata
    tensors: Mapping[str, torch.Tensor]
    vocabulary: torch.Tensor

    def save(self, path: Path, *, quantize: bool = True) -> None:
        """`quantize`: matrices as int8, a quarter of the size of fp32; else bf16."""
        stored: dict[str, torch.Tensor] = {_VOCABULARY: self.vocabulary.to(torch.int32).contiguous()}
        for name, tensor in self.tensors.items():
            if tensor.dim() == 2 and quantize:
                scale = tensor.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
                stored[name] = (tensor / scale).round().to(torch.int8)
                stored[name + _SCALE] = scale.float()
            else:
                stored[name] = tensor.to(torch.float32 if tensor.dim() == 1 else torch.bfloat16).contiguous()
        part = path.with_name(path.name + ".part")
        save_file(stored, part, {"format": _FORMAT, "card": json.dumps(asdict(self.card))})
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> DraftWeights:
        """Raises ModelNotFound, CorruptModel."""
        card = read_card(path)
        try:
            with safe_open(path, "pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        except (OSError, SafetensorError):
            raise CorruptModel(f"{path} is truncated or damaged; train or fetch it again") from None
        vocabulary = stored.pop(_VOCABULARY, None)
        if vocabulary is None or vocabulary.dim() != 1 or not len(vocabulary):
            raise CorruptModel(f"{path} has no draft vocabulary; train it again")
        tensors = {}
        for name, tensor in stored.items():
            if not name.endswith(_SCALE):
                scale = stored.get(name + _SCALE)
                tensors[name] = tensor.float() if scale is None else tensor.float() * scale
        return cls(card, tensors, vocabulary.long())


def is_draft(path: Path) -> bool:
    """Whether the file has this format."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("format") == _FORMAT
    except (OSError, SafetensorError):
        return False


def read_card(path: Path) -> DraftMetadata:
    """Raises ModelNotFound, CorruptModel."""
    if not path.is_file():
        raise ModelNotFound(f"there is no draft at {path}; make one with 'swarm-draft train'")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise CorruptModel(f"{path} is no draft of this version; train it again with 'swarm-draft train'")
        return DraftMetadata(**json.loads(metadata["card"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        raise CorruptModel(f"{path} is not the file of a draft; train it again with 'swarm-draft train'") from None


def layer_tensors(source: ModelSource, layer: int) -> Sequence[str]:
    """Names of the target's tensors of one layer, relative to the layer."""
    prefix = f"model.layers.{layer}."
    return [name.removeprefix(prefix) for name in source.names() if name.startswith(prefix)]
