"""The kinds of students that a run can train. Owns their shapes and the validation of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarm.errors import UsageError
from swarm_kernels.draft.medusa import MAX_HEADS
from swarm_kernels.models.source import ModelSource
from swarm_training.distill.student import HeadsStudent, LayersStudent, Student


class Recipe(Protocol):
    @property
    def checkpoint(self) -> str:
        """Its file name in the work folder; each kind has its own, and the chats are shared."""
        ...

    def check(self, num_layers: int) -> None:
        """Raises UsageError for a shape that the model cannot have."""
        ...

    def student(self, source: ModelSource) -> Student:
        """The untrained student."""
        ...


@dataclass(frozen=True, slots=True)
class LayersRecipe:
    """A draft: the target's first `base` layers unchanged, then layers initialized from the target's layers
    `copied`."""

    base: int = 0
    copied: tuple[int, ...] = (0,)
    checkpoint: str = "training.safetensors"

    def check(self, num_layers: int) -> None:
        if not self.copied or not 0 <= self.base < num_layers or not all(0 <= c < num_layers for c in self.copied):
            raise UsageError(f"the model has layers 0 to {num_layers - 1}; the draft needs at least one of its own")

    def student(self, source: ModelSource) -> Student:
        return LayersStudent.of_target(source, self.base, self.copied)


@dataclass(frozen=True, slots=True)
class HeadsRecipe:
    """Medusa heads, for the tail: head k predicts the token k + 2 positions after its input state."""

    count: int = 4
    checkpoint: str = "training-heads.safetensors"

    def check(self, num_layers: int) -> None:
        if not 1 <= self.count <= MAX_HEADS:
            raise UsageError(f"give 1 to {MAX_HEADS} heads")

    def student(self, source: ModelSource) -> Student:
        return HeadsStudent(source.config, self.count)
