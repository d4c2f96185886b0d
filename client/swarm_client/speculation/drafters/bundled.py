"""The shipped draft models. Owns which file belongs to which model: the fingerprint of its weights decides."""

from __future__ import annotations

from pathlib import Path

from swarm.types import Taps
from swarm_kernels.draft.file import read_card
from swarm_kernels.models.source import ModelSource

DATA = Path(__file__).parent / "data"


def find_bundled(target: ModelSource) -> Path | None:
    """The file of the draft for exactly these weights, if there is one. Raises CorruptModel."""
    for path in sorted(DATA.glob("*.draft")):
        if read_card(path).weight_hash == target.weight_hash:
            return path
    return None


def taps_of(draft: Path, target: ModelSource) -> Taps | None:
    """The hidden states that a trained draft reads, known before it is loaded. Raises CorruptModel."""
    layers = read_card(draft).taps
    return Taps(layers, target.config.hidden_size) if layers else None
