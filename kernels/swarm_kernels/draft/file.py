"""The file format of a trained drafter: a draft's layers and final norm, or Medusa heads for the tail.

Owns the format: one safetensors file of a few MB. The target's embedding, its first layers and the rows of its head are
not in it: they are read from the target's own weights, whose fingerprint is in the file. Matrices are int8 with a scale
per row, or bf16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors.torch import save_file

from swarm.errors import UNDECODABLE, CorruptModel, ModelError, ModelNotFound
from swarm.types import MAX_TAPS
from swarm_kernels.models.safetensors import read_header, read_metadata, read_tensor
from swarm_kernels.models.source import ModelFile, ModelSource

FINAL_NORM = "model.norm.weight"
_VOCABULARY = "draft.vocabulary"
_TEXTS, _TEXT_IDS = "draft.texts", "draft.text_ids"
_SCALE = ".scale"
_SHORT = 1 << 15  # different tokens that 16 bits number
_FORMAT = "swarm-draft-1"


_MAX_CARD = 1 << 16  # characters
_Name = Annotated[str, Meta(max_length=256)]
_Layers = Annotated[int, Meta(ge=0, le=4096)]
_Tokens = Annotated[int, Meta(ge=0, le=1 << 53)]


@dataclass(frozen=True, slots=True)
class DraftMetadata:
    """What the file holds and how well it did when it was made. `evaluation`: metrics by name, on held-out chats."""

    model: _Name
    weight_hash: _Name  # of the target
    base: _Layers  # first layers of the target that it uses unchanged
    layers: _Layers  # own layers after those
    heads: _Layers = 0  # own Medusa heads after those
    taps: Annotated[tuple[_Layers, ...], Meta(max_length=MAX_TAPS)] = ()  # whose hidden states it reads
    trained_tokens: _Tokens = 0
    seen_tokens: _Tokens = 0  # with repetition
    date: _Name = ""
    evaluation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class DraftWeights:
    """`tensors`: fp32; layers by Hugging Face's names, numbered from `card.base`, heads by Medusa's (`draft.medusa`).
    `vocabulary [v]`: the ids they can predict, ascending. `texts [n]`: of the target's own, for a
    `ContinuationStore`."""

    card: DraftMetadata
    tensors: Mapping[str, torch.Tensor]
    vocabulary: torch.Tensor
    texts: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))

    def save(self, path: Path, *, quantize: bool = True) -> None:
        """`quantize`: matrices as int8, a quarter of the size of fp32; else bf16."""
        stored: dict[str, torch.Tensor] = {_VOCABULARY: self.vocabulary.to(torch.int32).contiguous()}
        if len(self.texts):
            stored[_TEXT_IDS], numbers = torch.unique(self.texts.to(torch.int32), return_inverse=True)
            stored[_TEXTS] = numbers.to(torch.int32 if len(stored[_TEXT_IDS]) > _SHORT else torch.int16)
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
        with closing(ModelFile(path)) as file:
            stored = {name: read_tensor(tensor, name) for name, tensor in read_header(file).items()}
        vocabulary = stored.pop(_VOCABULARY, None)
        if vocabulary is None or not _is_vocabulary(vocabulary):
            raise CorruptModel(f"{path} has no draft vocabulary; train it again")
        texts = _texts(stored, path)
        tensors = {}
        for name, tensor in stored.items():
            if not name.endswith(_SCALE):
                scale = stored.get(name + _SCALE)
                if scale is not None and tuple(scale.shape) != (*tensor.shape[:1], 1):
                    raise CorruptModel(f"{path}: the scale of '{name[:80]}' does not fit it; train it again")
                tensors[name] = tensor.float() if scale is None else tensor.float() * scale
                if not bool(torch.isfinite(tensors[name]).all()):
                    raise CorruptModel(f"{path}: '{name[:80]}' holds numbers that are not finite; train it again")
        return cls(card, tensors, vocabulary.long(), texts)


def is_draft(path: Path) -> bool:
    """Whether the file has this format."""
    try:
        return _metadata(path).get("format") == _FORMAT
    except ModelError:
        return False


def read_card(path: Path) -> DraftMetadata:
    """Raises ModelNotFound, CorruptModel."""
    if not path.is_file():
        raise ModelNotFound(f"there is no draft at {path}; make one with 'swarm-draft train'")
    metadata = _metadata(path)
    if metadata.get("format") != _FORMAT:
        raise CorruptModel(f"{path} is no draft of this version; train it again with 'swarm-draft train'")
    card = metadata.get("card", "")
    try:
        return msgspec.json.decode(card if len(card) <= _MAX_CARD else "", type=DraftMetadata)
    except UNDECODABLE:
        raise CorruptModel(f"{path} is not the file of a draft; train it again with 'swarm-draft train'") from None


def _metadata(path: Path) -> dict[str, str]:
    with closing(ModelFile(path)) as file:
        try:
            return read_metadata(file)
        except CorruptModel:
            raise CorruptModel(f"{path} is not the file of a draft; train it again with 'swarm-draft train'") from None


def _texts(stored: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    """Takes them out of `stored`; none if there are none. Raises CorruptModel."""
    ids, numbers = stored.pop(_TEXT_IDS, torch.empty(0, dtype=torch.int32)), stored.pop(_TEXTS, None)
    if numbers is None:
        return torch.empty(0, dtype=torch.int32)
    whole = all(t.dim() == 1 and t.dtype in (torch.int16, torch.int32) for t in (ids, numbers))
    if not whole or not len(numbers) or int(numbers.min()) < 0 or int(numbers.max()) >= len(ids) or int(ids.min()) < -1:
        raise CorruptModel(f"{path} holds texts of no tokens; train it again")
    return ids[numbers.long()]


def _is_vocabulary(ids: torch.Tensor) -> bool:
    """Whether these are token ids, ascending."""
    if ids.dim() != 1 or not len(ids) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        return False
    return int(ids[0]) >= 0 and bool((ids[1:] > ids[:-1]).all())


def layer_tensors(source: ModelSource, layer: int) -> Sequence[str]:
    """Names of the target's tensors of one layer, relative to the layer."""
    prefix = f"model.layers.{layer}."
    return [name.removeprefix(prefix) for name in source.names() if name.startswith(prefix)]
