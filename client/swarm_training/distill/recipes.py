"""The kinds of students that a run can train. Owns their shapes and the validation of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarm.errors import UsageError
from swarm.types import MAX_TAPS
from swarm_kernels.draft.medusa import MAX_HEADS
from swarm_kernels.models.source import ModelSource
from swarm_training.distill.student import HeadsStudent, LayersStudent, Student
from swarm_training.distill.tapped_student import TappedStudent


class Recipe(Protocol):
    @property
    def peak_learning_rate(self) -> float: ...

    @property
    def checkpoint(self) -> str:
        """Its file name in the work folder; each kind has its own, and the chats are shared."""
        ...

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose states it reads as hops send them."""
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
    peak_learning_rate: float = 2e-3
    checkpoint: str = "training.safetensors"

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return ()

    def check(self, num_layers: int) -> None:
        if not self.copied or not 0 <= self.base < num_layers or not all(0 <= c < num_layers for c in self.copied):
            raise UsageError(f"the model has layers 0 to {num_layers - 1}; the draft needs at least one of its own")

    def student(self, source: ModelSource) -> Student:
        return LayersStudent.of_target(source, self.base, self.copied)


@dataclass(frozen=True, slots=True)
class HeadsRecipe:
    """Medusa heads, for the tail: head k predicts the token k + 2 positions after its input state."""

    count: int = 4
    peak_learning_rate: float = 2e-3
    checkpoint: str = "training-heads.safetensors"

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return ()

    def check(self, num_layers: int) -> None:
        if not 1 <= self.count <= MAX_HEADS:
            raise UsageError(f"give 1 to {MAX_HEADS} heads")

    def student(self, source: ModelSource) -> Student:
        return HeadsStudent(source.config, self.count)


@dataclass(frozen=True, slots=True)
class TappedRecipe:
    """A draft that reads hidden states of the target (EAGLE-3). `layers`: whose; by default four, low to last."""

    layers: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()  # layers of the target that its own begin as; by default the last one
    levels: int = 3  # tokens ahead that it learns, each on its own states for those before
    peak_learning_rate: float = 1e-3  # it starts from a solution, which larger steps destroy
    checkpoint: str = "training-eagle.safetensors"

    def taps(self, num_layers: int) -> tuple[int, ...]:
        fractions = {round(num_layers * part) for part in (0.3, 0.53, 0.77, 1.0)}  # 9, 16, 23 and 30 of 30
        return self.layers or tuple(sorted(fractions))

    def check(self, num_layers: int) -> None:
        taps = self.taps(num_layers)
        if list(taps) != sorted(set(taps)) or len(taps) > MAX_TAPS or taps[0] < 0 or taps[-1] != num_layers:
            raise UsageError(f"give at most {MAX_TAPS} ascending --taps of which the last is {num_layers}, the output")
        if not all(0 <= layer < num_layers for layer in self.copied) or not 1 <= self.levels <= 8:
            raise UsageError(f"the model has layers 0 to {num_layers - 1}; a draft learns 1 to 8 levels")

    def student(self, source: ModelSource) -> Student:
        last = source.config.num_layers - 1
        return TappedStudent(source, self.taps(last + 1), self.copied or (last,), self.levels)
