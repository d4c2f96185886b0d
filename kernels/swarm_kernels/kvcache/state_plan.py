"""How the rows of a batch advance the recurrent states of its sessions: the same in every layer with a state.

Owns the plan's data and nothing else. `recurrent_states` makes one for each batch, `runtime.hf_states` carries it out
in each layer. Tensors are kept by layer of the model, and never changed in place: sessions share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch

from swarm_kernels.batch import AttentionMetadata

LayerState = Mapping[str, torch.Tensor]
"""One session's state in one layer, by the name of the tensor, without a batch dimension."""


@dataclass(slots=True, eq=False)
class StateSnapshot:
    """A session's state after its first `position` tokens. A layer that is not in `layers` is in its initial state: at
    position 0, or not run yet by the batch that computes the snapshot."""

    position: int
    layers: dict[int, LayerState] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RowInput:
    """The input of one row to the layers' mixers, `[hidden]` each, from which its state can be computed again."""

    layers: dict[int, torch.Tensor] = field(default_factory=dict)


Source = int | RowInput
"""Where a row's input is: in the batch, by its row, or kept from an earlier one. Only the former has an output."""


@dataclass(slots=True)
class RowRun:
    """Rows of one session, one after another, that are long enough to be computed together."""

    start: StateSnapshot
    sources: list[Source]
    saves: list[tuple[int, StateSnapshot]]
    """(after how many rows, what becomes the state after them), ascending; the last one is after all rows."""


@dataclass(slots=True)
class Level:
    """Rows that depend on one row of the level before, or on a snapshot in the first level, and not on each other."""

    sources: list[Source] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # by their place in the level before; empty in the first level
    starts: list[StateSnapshot] = field(default_factory=list)  # of the first level
    saves: list[tuple[int, StateSnapshot]] = field(default_factory=list)  # (place in this level, the state after it)


@dataclass(slots=True)
class StatePlan:
    """In this order: all runs, then the levels, then the inputs to keep."""

    runs: list[RowRun] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    kept: list[tuple[int, RowInput]] = field(default_factory=list)  # (row of the batch, where its input is kept)

    def level(self, depth: int) -> Level:
        """The level of this depth; all before it exist."""
        if depth == len(self.levels):
            self.levels.append(Level())
        return self.levels[depth]


@dataclass(frozen=True, slots=True)
class StatefulMetadata(AttentionMetadata):
    """Of a batch on a span with recurrent states."""

    states: StatePlan

    @classmethod
    def of(cls, metadata: AttentionMetadata, states: StatePlan) -> StatefulMetadata:
        return cls(**{each.name: getattr(metadata, each.name) for each in fields(AttentionMetadata)}, states=states)
