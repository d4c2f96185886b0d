"""A batch under way that makes way, between two of its layers, for steps of those who are further behind.

Owns how far it has come. The event loop decides after how many layers it is to stop, while the device's thread runs
them one part after the other: to go back to the loop between two parts would take longer than a part does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)
Work = TypeVar("Work")


@runtime_checkable
class SlicedCompute(Protocol[Out_co]):
    """A planned batch that can run in parts. Others may run in between; none of them touches its KV blocks."""

    def run_layers(self, count: int) -> Sequence[Out_co] | None:
        """The next `count` of its layers, or what follows after the last of them. -> None, until all has run."""
        ...

    def __call__(self) -> Sequence[Out_co]:
        """All that is left."""
        ...


@dataclass(frozen=True, slots=True)
class Ran(Generic[Out]):
    """`outputs`: None if the batch has only paused."""

    outputs: Sequence[Out] | None


@dataclass(slots=True, eq=False)
class InterruptibleBatch(Generic[Work, Out]):
    """`layers`: that all of its steps run through. `final`: nothing stops it any more."""

    steps: Sequence[Work]
    compute: Callable[[], Sequence[Out]] | SlicedCompute[Out]
    layers: int
    started: float
    done: int = 0  # layers that have run; the device's thread counts
    stop_at: float = math.inf  # ... after which it pauses
    pauses: int = 0
    compute_ms: float = 0.0
    plan_ms: float = 0.0
    handover_ms: float = 0.0  # to the device's thread and back
    begun: float = 0.0  # when the last of its parts was handed to the device
    final: bool = False

    @property
    def done_fraction(self) -> float:
        return self.done / self.layers

    def begin(self, layers: int | None, stop_at: float = math.inf) -> Callable[[], Ran[Out] | None]:
        """-> what to call until it returns something: each call runs `layers` layers (None: all), or as many as are
        left. It pauses once it has run `stop_at` layers, which may be changed meanwhile, but runs some in any case."""
        self.stop_at, begun = stop_at, self.done
        sliced = self.compute if isinstance(self.compute, SlicedCompute) else None
        self.final = sliced is None or layers is None

        def part() -> Ran[Out] | None:
            if sliced is None or layers is None:
                return Ran(self.compute())
            if self.done >= self.stop_at and self.done > begun:
                return Ran(None)
            outputs = sliced.run_layers(layers)
            self.done = min(self.done + layers, self.layers)
            return None if outputs is None else Ran(outputs)

        return part
