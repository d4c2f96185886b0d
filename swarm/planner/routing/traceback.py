"""Reading the best chain out of a backward relaxation of `dag`.

Owns what a chain of rows is, and the exact order of chains of equal cost: hops, then ids, then longer first hops. Works
on the integer costs of `dag` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swarm.planner.routing.dag import INFINITE, Ints, LayerDag


@dataclass(frozen=True, slots=True)
class PathSegment:
    """Layers `[start, end)` run by row `row` of a `LayerDag`."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Path:
    """Segments that cover every layer in order, their owners, and the cost."""

    cost: int
    owners: tuple[int, ...]
    visits: tuple[PathSegment, ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The order of chains: cost, then lower owners hop by hop, then longer first hops."""
        return self.cost, self.owners, tuple(-v.end for v in self.visits)


def trace_back(dag: LayerDag, go: Ints, entries: Ints, exits: Ints, cap: int = INFINITE) -> Path | None:
    """The best chain: least cost, then lowest owners hop by hop, then the longest first hops; None for none.

    `entries`: cost before the first layer, `[R]`. Equal chains may differ in where they switch, so each step keeps all
    layers at which the next node can be entered without losing anything.
    """
    start = entries + go[0]
    best = int(start.min(initial=INFINITE))
    if best >= INFINITE:
        return None
    row = _lowest_owner(dag, np.flatnonzero(start == best))
    rows, steps = [row], []  # steps[i]: entry layer of hop i -> the boundaries where it may end
    entered = [0]
    while True:
        first = entered[0]
        run, leave = _leaving(dag, go, exits, row, first)
        ends = {b: _ends(run[b - first :], leave[b - first :], int(go[b, row]), b, cap) for b in entered}
        steps.append(ends)
        boundaries = sorted({e for options in ends.values() for e in options})
        if boundaries[-1] == dag.num_layers:
            return _read(dag, best, rows, steps)
        following = {b: _successors(dag, go, row, b, int(leave[b - first - 1])) for b in boundaries}
        row = _lowest_owner(dag, np.concatenate(list(following.values())))
        rows.append(row)
        entered = [b for b in boundaries if row in following[b]]


def _leaving(dag: LayerDag, go: Ints, exits: Ints, row: int, start: int) -> tuple[Ints, Ints]:
    """-> (τ of each layer from `start` on as far as `row` goes, the least cost after each if `row` is left there)."""
    held = dag.holds[start:, row]
    stop = dag.num_layers if held.all() else start + int(held.argmin())
    entry = go[start + 1 : stop + 1]
    if dag.may_enter is not None:
        entry = np.where(dag.may_enter[start + 1 : stop + 1], entry, INFINITE)
    leave: Ints = (entry + dag.rho[row]).min(axis=1)
    if dag.may_leave is not None:
        leave[~dag.may_leave[start + 1 : stop + 1, row]] = INFINITE
    if stop == dag.num_layers:
        leave[-1] = exits[row]
    return dag.tau[start:stop, row], leave


def _ends(tau: Ints, leave: Ints, cost: int, start: int, cap: int) -> list[int]:
    """Where a segment that begins at `start` and costs `cost` from there may end. `tau`, `leave`: from `start` on."""
    run = tau.cumsum()
    good = run + leave == cost
    if cap < INFINITE:
        good &= run <= cap
    return [start + 1 + int(i) for i in np.flatnonzero(good)]


def _successors(dag: LayerDag, go: Ints, row: int, boundary: int, leave: int) -> Ints:
    good = dag.rho[row] + go[boundary] == leave
    if dag.may_enter is not None:
        good &= dag.may_enter[boundary]
    return np.flatnonzero(good)


def _lowest_owner(dag: LayerDag, rows: Ints) -> int:
    return int(rows[np.argmin(dag.owner[rows])])


def _read(dag: LayerDag, cost: int, rows: list[int], steps: list[dict[int, list[int]]]) -> Path:
    """Of all ways to split the layers among `rows` at this cost, the one whose first hops are longest."""
    wanted = {dag.num_layers}
    for i in range(len(rows) - 1, -1, -1):
        steps[i] = {b: kept for b, ends in steps[i].items() if (kept := [e for e in ends if e in wanted])}
        wanted = set(steps[i])
    visits, start = [], 0
    for row, ends in zip(rows, steps, strict=True):
        visits.append(PathSegment(row, start, max(ends[start])))
        start = visits[-1].end
    return Path(cost, tuple(int(dag.owner[v.row]) for v in visits), tuple(visits))
