"""How the rows of a batch advance the recurrent states of its sessions: the same in every layer with a state.

Owns the plan's data, and the plan as the rows of one call. `recurrent_states` makes one for each batch,
`runtime.hf_states` carries it out in each layer. Tensors are kept by layer of the model, and never changed in place:
sessions share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops.base.recurrence import StateRows

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


@dataclass(frozen=True, slots=True, eq=False)
class OneCall:
    """A plan whose rows are computed in one call: those of the batch, then those of inputs that were `kept` earlier."""

    rows: StateRows
    kept: list[RowInput]
    starts: list[StateSnapshot]
    saved: list[StateSnapshot]


@dataclass(slots=True)
class StatePlan:
    """In this order: all runs, then the levels, then the inputs to keep."""

    runs: list[RowRun] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    kept: list[tuple[int, RowInput]] = field(default_factory=list)  # (row of the batch, where its input is kept)
    _one_call: OneCall | None = None

    def level(self, depth: int) -> Level:
        """The level of this depth; all before it exist."""
        if depth == len(self.levels):
            self.levels.append(Level())
        return self.levels[depth]

    def in_one_call(self, rows: int) -> OneCall:
        """The plan, which does not change any more, for a batch of so many rows; the same in every layer."""
        if self._one_call is None:
            self._one_call = _Merger(rows).merge(self)
        return self._one_call


class _Merger:
    """Numbers the rows of a plan."""

    def __init__(self, rows: int) -> None:
        self._order: list[int] = []
        self._parent = [0] * rows
        self._kept: list[RowInput] = []
        self._starts: dict[int, tuple[int, StateSnapshot]] = {}  # by id
        self._saved: list[tuple[int, StateSnapshot]] = []

    def merge(self, plan: StatePlan) -> OneCall:
        batch_rows = len(self._parent)
        for run in plan.runs:
            row = self._start(run.start)
            for done, source in enumerate(run.sources, 1):
                row = self._add(source, row, batch_rows)
                self._saved += [(row, snapshot) for count, snapshot in run.saves if count == done]
        before: list[int] = []
        for level in plan.levels:
            parents = [self._start(start) for start in level.starts] or [before[place] for place in level.parents]
            before = [self._add(*pair, batch_rows) for pair in zip(level.sources, parents, strict=True)]
            self._saved += [(before[place], snapshot) for place, snapshot in level.saves]
        saved = [row for row, _ in self._saved]
        return OneCall(
            StateRows.of(self._order, self._parent, len(self._starts), saved),
            self._kept,
            [start for _, start in self._starts.values()],
            [snapshot for _, snapshot in self._saved],
        )

    def _add(self, source: Source, parent: int, batch_rows: int) -> int:
        if isinstance(source, int):
            row = source
            self._parent[row] = parent
        else:
            row = batch_rows + len(self._kept)
            self._kept.append(source)
            self._parent.append(parent)
        self._order.append(row)
        return row

    def _start(self, snapshot: StateSnapshot) -> int:
        """The parent of the row after it: the row that it is saved after, or a start."""
        for row, saved in self._saved:
            if saved is snapshot:
                return row
        return -1 - self._starts.setdefault(id(snapshot), (len(self._starts), snapshot))[0]


@dataclass(frozen=True, slots=True)
class StatefulMetadata(AttentionMetadata):
    """Of a batch on a span with recurrent states."""

    states: StatePlan

    @classmethod
    def of(cls, metadata: AttentionMetadata, states: StatePlan) -> StatefulMetadata:
        return cls(**{each.name: getattr(metadata, each.name) for each in fields(AttentionMetadata)}, states=states)
