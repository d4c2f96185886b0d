"""The card of a trained drafter's file: whose drafter it is and how well it did. Owns what it says; reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swarm.errors import UNDECODABLE, CorruptModel, ModelError, ModelNotFound
from swarm.types import MAX_TAPS
from swarm_kernels.models.safetensors import read_metadata
from swarm_kernels.models.source import ModelFile

FORMAT = "swarm-draft-1"

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


def is_draft(path: Path) -> bool:
    """Whether the file has this format."""
    try:
        return _metadata(path).get("format") == FORMAT
    except ModelError:
        return False


def read_card(path: Path) -> DraftMetadata:
    """Raises ModelNotFound, CorruptModel."""
    if not path.is_file():
        raise ModelNotFound(f"there is no draft at {path}; make one with 'swarm-draft train'")
    metadata = _metadata(path)
    if metadata.get("format") != FORMAT:
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
