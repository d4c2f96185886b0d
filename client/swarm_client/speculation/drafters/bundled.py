"""The shipped draft models. Owns which file belongs to which model: the fingerprint of its weights decides."""

from __future__ import annotations

from pathlib import Path

from swarm_kernels.draft.card import read_card
from swarm_kernels.models.source import ModelSource

DATA = Path(__file__).parent / "data"


def find_bundled(target: ModelSource) -> Path | None:
    """The file of the draft for exactly these weights, if there is one. Raises CorruptModel."""
    for path in sorted(DATA.glob("*.draft")):
        if read_card(path).weight_hash == target.weight_hash:
            return path
    return None
